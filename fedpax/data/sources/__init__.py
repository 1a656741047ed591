"""Data sources by name."""
