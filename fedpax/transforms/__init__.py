"""Passes over the jaxpr of a program: run when it is compiled, or to report on it."""

from fedpax.transforms.cost import Cost, cost
from fedpax.transforms.explain import explain
from fedpax.transforms.out_of_core import out_of_core

__all__ = ["Cost", "cost", "explain", "out_of_core"]
