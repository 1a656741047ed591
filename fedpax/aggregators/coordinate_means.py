"""The median and the trimmed mean by coordinate."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpax.aggregators.aggregator import Aggregator, Weights, present, without_state
from fedpax.aggregators.all_updates import known_to_all, reduce_coordinates
from fedpax.checks import Range, check_argument
from fedpax.primitives import federated_sum


def coordinate_median() -> Aggregator:
    """Take the median of each coordinate over the present participants.

    For an even number it is the mean of the middle two. Fewer than half of the participants cannot
    move it beyond the values of the others.

    Memory grows with the number of participants. On a mesh, an all-to-all divides the coordinates
    among the devices.

    Returns:
        An aggregator without state and metrics. A participant is present if its weight is above 0;
        the weights have no other effect. A NaN counts as infinity, the largest value. The result
        has the dtype of the updates, float32 for integers; 0 if no participant is present.

    Example:
        >>> import fedpax
        >>> aggregator = coordinate_median()
        >>> @fedpax.program(clients=3)
        ... def combine(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> combine(jnp.array([[1.0, 2.0], [2.0, 1.0], [jnp.nan, -1e9]])).tolist()
        [2.0, 1.0]

    Reference:
        Yin et al., arXiv:1803.01498, definition 1 and algorithm 1, option I.
    """
    return coordinate_mean(median_of_sorted)


def trimmed_mean(trim_fraction: float) -> Aggregator:
    """Average each coordinate without its largest and smallest values.

    With m present participants, the k = `floor(trim_fraction * m)` largest and the k smallest
    values of each coordinate are left out. k faulty participants cannot move a coordinate beyond
    the values of the other ones. Layout and cost are as in `coordinate_median`.

    Args:
        trim_fraction: fraction of faulty participants to protect against, at least 0 and below 1/2.

    Returns:
        As in `coordinate_median`.

    Raises:
        TypeError: `trim_fraction` is not a number.
        ValueError: `trim_fraction` is out of range.

    Example:
        >>> import fedpax
        >>> aggregator = trimmed_mean(0.25)
        >>> @fedpax.program(clients=4)
        ... def combine(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> combine(jnp.array([1e9, 1.0, 2.0, -1e9])).item()
        1.5

    Reference:
        Yin et al., arXiv:1803.01498, definition 2 and algorithm 1, option II.
    """
    trim_fraction = check_argument(
        "trimmed_mean",
        "trim_fraction",
        trim_fraction,
        Range(least=0, below=0.5),
        remedy="Use coordinate_median() for the limit of 0.5, and 0.0 to trim nothing.",
    )

    def mean_of_sorted(x: Float[Array, "participants ..."], count: Int[Array, ""]) -> jax.Array:
        # In Python's floats, so that 0.1 of 10 is 1.
        trimmed = [int(trim_fraction * m + 1e-9) for m in range(x.shape[0] + 1)]
        first = jnp.array(trimmed)[count]
        place = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], *[1] * (x.ndim - 1)), 0)
        kept = (first <= place) & (place < count - first)
        return jnp.sum(jnp.where(kept, x, 0.0), 0) / jnp.maximum(count - 2 * first, 1)

    return coordinate_mean(mean_of_sorted)


def sort_participants(
    x: Float[Array, "participants ..."], here: Bool[Array, " participants"]
) -> Float[Array, "participants ..."]:
    """Sort each coordinate: first numbers, then infinities, NaNs and absent ones as infinity."""
    known = here.reshape(-1, *[1] * (x.ndim - 1)) & ~jnp.isnan(x)
    return sort_rows(jnp.where(known, x, jnp.inf))


def median_of_sorted(
    x: Float[Array, "participants ..."], count: Int[Array, ""]
) -> Float[Array, "..."]:
    """Return the mean of the middle two of the first `count` values; the middle one if odd."""

    def at(place: Int[Array, ""]) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, place, 0, keepdims=False)

    low, high = at(jnp.maximum(count - 1, 0) // 2), at(count // 2)
    return jnp.where(low == high, low, 0.5 * low + 0.5 * high)


def coordinate_mean(
    mean_of_sorted: Callable[[Float[Array, "participants ..."], Int[Array, ""]], jax.Array],
) -> Aggregator:
    """Make an aggregator from a function of the sorted values and the number of present ones."""

    def combine(updates: chex.ArrayTree, weights: Weights) -> chex.ArrayTree:
        here = present(weights)
        count, here = federated_sum(here), known_to_all(here)

        def reduce(x: Float[Array, "participants ..."]) -> Float[Array, "..."]:
            mean = mean_of_sorted(sort_participants(x, here), count)
            return jnp.where(count == 0, 0.0, mean)

        return reduce_coordinates(reduce, updates)

    return without_state(combine, robust=True, counts_alike=True)


# ---- a sorting network: sorts the participants' values of all coordinates by whole rows


def sort_rows(x: Float[Array, "participants ..."]) -> Float[Array, "participants ..."]:
    """Sort each coordinate over the participants, in ascending order."""
    # On a CPU, XLA sorts coordinates one by one, with a call for each comparison. A bitonic sorting
    # network compares whole rows. Batcher, AFIPS 1968.
    return jax.lax.platform_dependent(x, cpu=_bitonic_sort, default=lambda x: jnp.sort(x, 0))


def _bitonic_sort(x: Float[Array, "participants ..."]) -> Float[Array, "participants ..."]:
    n = x.shape[0]
    if n < 2:
        return x
    levels = (n - 1).bit_length()
    steps = [(level, bit) for level in range(levels) for bit in range(level, -1, -1)]
    level, bit = jnp.array(steps).T[:, :, None]
    row = jnp.arange(2**levels)
    partners = row ^ 1 << bit
    ascending = row >> level + 1 & 1 == 0

    def step(
        x: Float[Array, "rows ..."], pairs: tuple[Int[Array, " rows"], Bool[Array, " rows"]]
    ) -> tuple[Float[Array, "rows ..."], None]:
        partner, takes_less = pairs
        partner_row = jnp.take(x, partner, 0, mode="clip")
        takes_less = takes_less.reshape(-1, *[1] * (x.ndim - 1))
        # `minimum` and `maximum` would add 0 times the other row's derivative, which may be NaN,
        # and halve the derivatives of equal values. `where` would need equal shardings, also on an
        # explicit axis of one device.
        is_exchanged = (takes_less & (x > partner_row)) | (~takes_less & (x < partner_row))
        return jnp.where(is_exchanged, partner_row, x), None

    padding = [(0, row.size - n)] + [(0, 0)] * (x.ndim - 1)
    rows = jnp.pad(x, padding, constant_values=jnp.inf)
    return jax.lax.scan(step, rows, (partners, (row < partners) == ascending))[0][:n]
