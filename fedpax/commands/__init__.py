"""The commands of `fedpax`, one per module; `fedpax.main` dispatches to them."""
