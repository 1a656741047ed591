"""Programs, and the passes over their jaxprs that compile and run them."""

from fedpax.transforms.out_of_core import out_of_core
from fedpax.transforms.placed_closures import PlacedClosureWarning
from fedpax.transforms.program import program
from fedpax.transforms.stages import stages

__all__ = ["PlacedClosureWarning", "out_of_core", "program", "stages"]
