"""Passes over the jaxpr of a program, run when it is compiled."""

from fedpax.transforms.explain import explain
from fedpax.transforms.out_of_core import out_of_core

__all__ = ["explain", "out_of_core"]
