"""fedpax: federated and multi-island training as jitted JAX functions."""

from fedpax.clients.cohort import Cohort
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
from fedpax.transforms import explain, out_of_core

__version__ = "0.1.0"

__all__ = [
    "Cohort",
    "explain",
    "federated_broadcast",
    "federated_map",
    "federated_max",
    "federated_mean",
    "federated_min",
    "federated_sum",
    "make_mesh",
    "out_of_core",
    "program",
]
