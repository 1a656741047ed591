"""Programs, and passes over their jaxprs: run when a program is compiled, or to report on it."""

from fedpax.transforms.cost import Cost, cost
from fedpax.transforms.explain import explain
from fedpax.transforms.out_of_core import out_of_core
from fedpax.transforms.placed_closures import PlacedClosureWarning
from fedpax.transforms.program import program

__all__ = ["Cost", "PlacedClosureWarning", "cost", "explain", "out_of_core", "program"]
