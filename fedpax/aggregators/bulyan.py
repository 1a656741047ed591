"""Bulyan: a selection by Krum, then a trimmed mean of each coordinate around its median."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpax.aggregators.aggregator import Aggregator, Weights, without_state
from fedpax.aggregators.all_updates import reduce_coordinates
from fedpax.aggregators.coordinate_means import median_of_sorted, sort_participants
from fedpax.aggregators.krum import BYZANTINE_REMEDY, distances_of_present, krum_order
from fedpax.aggregators.presence import num_participants
from fedpax.checks import COUNT_OR_ZERO, check_argument


def bulyan(num_byzantine: int) -> Aggregator:
    """Select updates by Krum, and average each coordinate over the values next to its median.

    With m present participants, f of which may send wrong updates:

    1. Krum selects an update; it is taken out, and Krum selects among the rest, until
       `theta = m - 2 f` updates are selected.
    2. Each coordinate is the mean of the `theta - 2 f` selected values closest to their median.

    Krum alone bounds the distance of the selected update, which leaves room for a large error in
    one coordinate; the second step bounds each coordinate. For m present participants, f of which
    may send wrong updates, the bound is `m >= 4 f + 3`. With fewer, the result is 0.

    It needs the memory of `krum`. On a mesh, it sends what `coordinate_median` and the distances of
    `krum` send: two all-to-alls, an all-reduce and an all-gather.

    Args:
        num_byzantine: f, number of participants that may send wrong updates.

    Returns:
        An aggregator without state and metrics. A participant is present if its weight is not 0;
        the weights have no other effect. NaN and infinity are treated as in `krum`. The result has
        the dtype of the updates, float32 for integers.

    Raises:
        TypeError: `num_byzantine` is not an int.
        ValueError: it is negative; when the program is traced: too few participants for it.

    Example:
        >>> import fedpax
        >>> aggregator = bulyan(1)
        >>> @fedpax.program(clients=7)
        ... def combine(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> combine(jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e9])).item()
        3.0

    Reference:
        El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium,
        arXiv:1802.07927, section 4. Where the paper's last selections leave fewer than `2 f + 3`
        updates, the number of neighbours is at least 1. The median of an even number of values is
        the mean of the middle two.
    """
    num_byzantine = check_argument(
        "bulyan", "num_byzantine", num_byzantine, COUNT_OR_ZERO, remedy=BYZANTINE_REMEDY
    )

    def combine(updates: chex.ArrayTree, weights: Weights) -> chex.ArrayTree:
        n = num_participants()
        distances, here = distances_of_present("bulyan", updates, weights, num_byzantine, 4)
        chosen = _select_repeatedly(distances, here, num_byzantine)
        count = jnp.sum(chosen)
        closest = jnp.maximum(count - 2 * num_byzantine, 1)

        def reduce(x: Float[Array, "participants ..."]) -> Float[Array, "..."]:
            x = sort_participants(x, chosen)
            # The values closest to the median are neighbours in the sorted order. They start after
            # the values that are farther below the median than the value `closest` places later is
            # above it. Without signs, they could not start after equal values below the median.
            below = median_of_sorted(x, count)[None] - x
            place = jax.lax.broadcasted_iota(jnp.int32, (n, *[1] * (x.ndim - 1)), 0)
            first = jnp.sum((place < count - closest) & (below > -jnp.roll(below, -closest, 0)), 0)
            kept = (first <= place) & (place < first + closest)
            mean = jnp.sum(jnp.where(kept, x, 0.0), 0) / closest
            return jnp.where(count == 0, 0.0, mean)

        return reduce_coordinates(reduce, updates)

    return without_state(combine, robust=True)


def _select_repeatedly(
    distances: Float[Array, "participants participants"],
    here: Bool[Array, " participants"],
    num_byzantine: int,
) -> Bool[Array, " participants"]:
    """Select `m - 2 f` of m present participants, at least one, by Krum, one after the other."""
    wanted = jnp.maximum(jnp.sum(here) - 2 * num_byzantine, 1)

    def add_best(i: jax.Array, chosen: jax.Array) -> jax.Array:
        left = here & ~chosen
        first = krum_order(distances, left, num_byzantine)[0]
        return jnp.where(i < wanted, chosen | (left & (jnp.arange(left.size) == first)), chosen)

    most = distances.shape[0] - 2 * num_byzantine
    return jax.lax.fori_loop(0, most, add_best, jnp.zeros_like(here))
