"""Krum, Multi-Krum and Bulyan."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpax.aggregators.aggregator import (
    Aggregator,
    Weights,
    num_participants,
    present,
    select,
    without_state,
)
from fedpax.aggregators.all_updates import known_to_all, reduce_coordinates, squared_distances
from fedpax.aggregators.coordinate_means import median_of_sorted, sort_participants
from fedpax.checks import COUNT, COUNT_OR_ZERO, check_argument
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_mean

BYZANTINE_REMEDY = "Use 0 if no participant sends wrong updates."


def krum(num_byzantine: int, *, num_selected: int = 1) -> Aggregator:
    """Select the update that is closest to its neighbours (Krum), or average several (Multi-Krum).

    With m present participants, f of which may send wrong updates, the score of an update is the
    sum of the squared distances to its `m - f - 2` nearest neighbours. The `num_selected` updates
    with the smallest scores are averaged. Krum's bound is `m >= 2 f + 3`; with fewer, the result is
    0.

    Memory grows with the number of participants. On a mesh, it takes an all-to-all of the updates.
    The float32 distances resolve differences above about 0.001 of the updates' norms.

    Args:
        num_byzantine: f, number of participants that may send wrong updates.
        num_selected: number of updates to average. Default 1: Krum. At most `n - f - 2`.

    Returns:
        An aggregator without state and metrics. A participant is present if its weight is
        above 0; the selected updates are averaged with equal weights. An update with a NaN or an
        infinity is infinitely far from every other one. The result has the dtype of the updates,
        float32 for integers.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is negative, or `num_selected` is 0; when the program is traced:
            too few participants for f, or fewer than `num_selected + f + 2`.

    Example:
        >>> import fedpax
        >>> aggregator = krum(1)
        >>> @fedpax.program(clients=5)
        ... def combine(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> combine(jnp.array([1.0, 2.0, 4.0, 3.0, 1e9])).item()  # of 2 and 3, the first
        2.0

    Reference:
        Blanchard et al., arXiv:1703.02757, section 4 (Krum) and section 6 (Multi-Krum).
    """
    num_byzantine = check_argument(
        "krum", "num_byzantine", num_byzantine, COUNT_OR_ZERO, remedy=BYZANTINE_REMEDY
    )
    num_selected = check_argument(
        "krum", "num_selected", num_selected, COUNT, remedy="Use 1 to select one update."
    )

    def combine(updates: chex.ArrayTree, weights: Weights) -> chex.ArrayTree:
        n = num_participants()
        distances, here = distances_of_present("krum", updates, weights, num_byzantine, 2)
        if num_selected > n - num_byzantine - 2:
            raise ArgumentError(
                f"krum(): num_selected is {num_selected}, expected at most n - num_byzantine - 2 = "
                f"{n - num_byzantine - 2} for {n} participants. Select fewer."
            )
        order = krum_order(distances, here, num_byzantine)
        most = jnp.minimum(num_selected, jnp.sum(here) - num_byzantine - 2)
        chosen = here & (jnp.argsort(order) < most)
        selected = federated_map(lambda update, taken: select(taken, update), updates, chosen)
        return federated_mean(selected, chosen)

    def limits(n: int) -> dict[str, int]:
        return {"num_byzantine": (n - 3) // 2, "num_selected": n - num_byzantine - 2}

    return without_state(combine, robust=True, counts_alike=True, limits=limits)


def distances_of_present(
    function: str, updates: chex.ArrayTree, weights: Weights, num_byzantine: int, factor: int
) -> tuple[Float[Array, "participants participants"], Bool[Array, " participants"]]:
    """Compute the squared distances of all pairs of updates, and which participants are present."""
    # No participant counts as present if too few are. Both are server values.
    n = num_participants()
    if n < factor * num_byzantine + 3:
        most = (n - 3) // factor
        remedy = f"Use at most {most}, or more participants." if most >= 0 else "Use more."
        raise ArgumentError(
            f"{function}(): num_byzantine is {num_byzantine}, but {n} participants are "
            f"fewer than {factor} * num_byzantine + 3 = {factor * num_byzantine + 3}. {remedy}"
        )
    here = known_to_all(present(weights))
    enough = jnp.sum(here) >= factor * num_byzantine + 3
    return squared_distances(updates), here & enough


def krum_order(
    distances: Float[Array, "participants participants"],
    here: Bool[Array, " participants"],
    num_byzantine: int,
) -> Int[Array, " participants"]:
    """Order participants by the sum of squared distances to their nearest neighbours."""
    # If scores are equal, the next neighbour decides.
    n = distances.shape[0]
    neighbour = here[None, :] & ~jnp.eye(n, dtype=bool)
    nearest = jnp.sort(jnp.where(neighbour, distances, jnp.nan), axis=1)  # NaN last
    count = jnp.maximum(jnp.sum(here) - num_byzantine - 2, 1)

    def sum_of_nearest(count: Int[Array, ""]) -> Float[Array, " participants"]:
        return jnp.sum(jnp.where(jnp.arange(n)[None, :] < count, nearest, 0.0), axis=1)

    return jnp.lexsort((sum_of_nearest(count + 1), sum_of_nearest(count), ~here))


def bulyan(num_byzantine: int) -> Aggregator:
    """Select updates by Krum, and average each coordinate over the values next to its median.

    With m present participants, f of which may send wrong updates:

    1. Krum selects an update; it is taken out, and Krum selects among the rest, until
       `theta = m - 2 f` updates are selected.
    2. Each coordinate is the mean of the `theta - 2 f` selected values closest to their median.

    The bound is `m >= 4 f + 3`; with fewer, the result is 0.

    Args:
        num_byzantine: f, number of participants that may send wrong updates.

    Returns:
        An aggregator without state and metrics. A participant is present if its weight is above 0;
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
        El Mhamdi et al., arXiv:1802.07927, section 4.
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

        def reduce(x: Float[Array, "participants ..."]) -> Float[Array, ...]:
            x = sort_participants(x, chosen)
            # The closest values are a window of the sorted order. It starts after the values that
            # are farther below the median than the value `closest` places later is above it; with
            # signs, so that it can start after equal values below the median.
            below = median_of_sorted(x, count)[None] - x
            place = jax.lax.broadcasted_iota(jnp.int32, (n, *[1] * (x.ndim - 1)), 0)
            first = jnp.sum((place < count - closest) & (below > -jnp.roll(below, -closest, 0)), 0)
            kept = (first <= place) & (place < first + closest)
            mean = jnp.sum(jnp.where(kept, x, 0.0), 0) / closest
            return jnp.where(count == 0, 0.0, mean)

        return reduce_coordinates(reduce, updates)

    def limits(n: int) -> dict[str, int]:
        return {"num_byzantine": (n - 3) // 4}

    return without_state(combine, robust=True, counts_alike=True, limits=limits)


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
