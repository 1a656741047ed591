"""The commands of `fedpax`, one per module; `fedpax.main` dispatches to them."""

from fedpax.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
