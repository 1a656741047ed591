"""Passes over the jaxpr of a program, run when it is compiled."""

from fedpax.transforms.explain import explain
from fedpax.transforms.pieces import in_pieces

__all__ = ["explain", "in_pieces"]
