"""Flower as the carrier of rounds on nodes: its apps, its processes and SecAgg+."""

from fedpax.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
