"""Federated primitives: placements, broadcasts, maps and reductions."""

from fedpax.lazy_names import public_names as _public_names
from fedpax.primitives.broadcast import federated_broadcast as federated_broadcast
from fedpax.primitives.broadcast import federated_broadcast_p as federated_broadcast_p
from fedpax.primitives.map import federated_map as federated_map
from fedpax.primitives.map import federated_map_p as federated_map_p
from fedpax.primitives.max_min import federated_max as federated_max
from fedpax.primitives.max_min import federated_max_p as federated_max_p
from fedpax.primitives.max_min import federated_min as federated_min
from fedpax.primitives.max_min import federated_min_p as federated_min_p
from fedpax.primitives.mean import federated_mean as federated_mean
from fedpax.primitives.mean import federated_mean_p as federated_mean_p
from fedpax.primitives.placement import Placement as Placement
from fedpax.primitives.placement import federated_program_p as federated_program_p
from fedpax.primitives.sum import federated_sum as federated_sum
from fedpax.primitives.sum import federated_sum_p as federated_sum_p

__all__ = _public_names(globals())
