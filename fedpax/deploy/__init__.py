"""Engines that run the stages of a program, and their export to files."""

from fedpax.lazy_names import lazy_names

# On first use: a process that forwards messages needs no JAX.
__all__, __getattr__, __dir__ = lazy_names(__name__)
