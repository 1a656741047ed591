"""fedpax: federated and multi-island training as jitted JAX functions."""

from fedpax.parallel.mesh import make_mesh
from fedpax.primitives import (
    federated_broadcast,
    federated_map,
    federated_max,
    federated_mean,
    federated_min,
    federated_sum,
    program,
)
from fedpax.transforms import explain, in_pieces

__version__ = "0.1.0"

__all__ = [
    "explain",
    "federated_broadcast",
    "federated_map",
    "federated_max",
    "federated_mean",
    "federated_min",
    "federated_sum",
    "in_pieces",
    "make_mesh",
    "program",
]
