"""Schedules: when participants arrive, as `fedpax.simulation` computes it for a cohort."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int


class Arrivals(NamedTuple):
    """Arrivals of clients at a server, which updates its model once per round.

    Attributes:
        staleness: int `[participants]`, number of server updates between the model that a client
            trained from and the model that its update is applied to.

    Example:
        >>> Arrivals(np.array([0, 3, 1])).staleness.max().item()
        3
    """

    staleness: Int[jax.Array | np.ndarray, " participants"]


class ArrivalOrder(NamedTuple):
    """The order in which islands arrive at a server, each at most once per round.

    Attributes:
        position: int `[islands]`, an island's position in the order of the round's arrivals, from
            0; -1 for an island that does not arrive. Islands that arrive at the same time have the
            same position, and none is left out. An island without a step (`Cohort.num_steps`) takes
            the model and contributes nothing.

    Example:
        >>> order = ArrivalOrder(np.array([1, 0, -1, 0]))  # 1 and 3 together, then 0
        >>> (order.position >= 0).tolist()
        [True, True, False, True]
    """

    position: Int[jax.Array | np.ndarray, " islands"]


class RegionalOrder(NamedTuple):
    """The order of a round's events at regional servers and the global server.

    Positions count from 0, and none is left out. At equal positions, arrivals come first, then
    sends, then the global server, then merges. The fields of a region's event are equal for all its
    islands; -1 for none.

    Attributes:
        position: int `[islands]`, the position of an island's arrival at its region's server, as in
            `ArrivalOrder`.
        sends: int `[islands]`, the position at which the region sends its update to the global
            server.
        applies: int `[islands]`, the position at which the global server applies the region's
            update, and sends its model back.
        merges: int `[islands]`, the position at which the region merges the global model.

    Example:
        >>> together = np.zeros(4, int)  # two regions of two islands, and transfers without delay
        >>> order = RegionalOrder(np.array([0, 0, 0, 0]), together, together, together)
        >>> order.sends.tolist()
        [0, 0, 0, 0]
    """

    position: Int[jax.Array | np.ndarray, " islands"]
    sends: Int[jax.Array | np.ndarray, " islands"]
    applies: Int[jax.Array | np.ndarray, " islands"]
    merges: Int[jax.Array | np.ndarray, " islands"]


class Syncs(NamedTuple):
    """The synchronizations of a round, one per fragment of the model.

    Attributes:
        num_steps: int `[islands, fragments]`, number of inner steps between the previous
            synchronization and this one; 0 while an island is down.
        weights: float `[islands, fragments]`, weight of an island's fragment in the merge; 0 if the
            island is not part of it.
        receives: bool `[islands, fragments]`, whether the island is up and takes the merged
            fragment.
        rejoins: bool `[islands, fragments]`, whether the island comes back before these steps, and
            begins them from the whole outer model.

    Example:
        >>> one, yes = np.ones((2, 1)), np.ones((2, 1), bool)
        >>> Syncs(5 * one.astype(int), one, receives=yes, rejoins=~yes).num_steps.sum().item()
        10
    """

    num_steps: Int[jax.Array | np.ndarray, "islands fragments"]
    weights: Float[jax.Array | np.ndarray, "islands fragments"]
    receives: Bool[jax.Array | np.ndarray, "islands fragments"]
    rejoins: Bool[jax.Array | np.ndarray, "islands fragments"]
