"""Federated primitives: placements, broadcasts, maps and reductions."""

from fedpax.primitives.broadcast import federated_broadcast, federated_broadcast_p
from fedpax.primitives.map import federated_map, federated_map_p
from fedpax.primitives.max_min import (
    federated_max,
    federated_max_p,
    federated_min,
    federated_min_p,
)
from fedpax.primitives.mean import federated_mean, federated_mean_p
from fedpax.primitives.placement import Placement, federated_program_p
from fedpax.primitives.sum import federated_sum, federated_sum_p

__all__ = [
    "Placement",
    "federated_broadcast",
    "federated_broadcast_p",
    "federated_map",
    "federated_map_p",
    "federated_max",
    "federated_max_p",
    "federated_mean",
    "federated_mean_p",
    "federated_min",
    "federated_min_p",
    "federated_program_p",
    "federated_sum",
    "federated_sum_p",
]
