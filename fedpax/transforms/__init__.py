"""Passes over the jaxpr of a program, run when it is compiled."""

from fedpax.transforms.streaming import explain

__all__ = ["explain"]
