"""The geometric median of the updates."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Num

from fedpax.aggregators.aggregator import (
    Aggregator,
    Weights,
    mean_dtype,
    num_participants,
    select,
    without_state,
)
from fedpax.aggregators.all_updates import known_to_all
from fedpax.checks import COUNT, POSITIVE, check_argument
from fedpax.primitives import federated_map, federated_mean


def geometric_median(*, num_iterations: int = 8, smoothing: float = 1e-6) -> Aggregator:
    """Approximate the geometric median: the point with the least sum of distances to the updates.

    The smoothed Weiszfeld algorithm minimizes `sum_i w_i ||u_i - v||`. With smoothing nu, an
    iteration is a weighted mean:

        b_i = w_i / max(nu, ||u_i - v||);   v <- sum_i b_i u_i / sum_i b_i.

    The first point is such a mean around v = 0, with the weighted median of the norms for nu.

    With less than half of the total weight wrong, the first point is within twice the largest norm
    of the other updates.

    Args:
        num_iterations: number of iterations after the first point, at least 1. Default 8.
        smoothing: nu, above 0, in the units of the update's norm.

    Returns:
        An aggregator without state and metrics. A participant is present if its weight is above 0,
        and the norm of its update is finite in float32. The result has the dtype of the updates,
        float32 for integers; 0 if no participant is present.

    Raises:
        TypeError: `num_iterations` is not an int, or `smoothing` is not a number.
        ValueError: `num_iterations` or `smoothing` is not positive.

    Example:
        >>> import fedpax
        >>> aggregator = geometric_median()
        >>> @fedpax.program(clients=3)
        ... def combine(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> median = combine(jnp.array([[0.0, 0.0], [1.0, 1.0], [9e9, 1e10]]))
        >>> bool(jnp.linalg.norm(median) < 2)
        True

    Reference:
        Pillutla et al., arXiv:1912.13445, algorithm 2. The first point is chosen here.
    """
    name = "geometric_median"
    remedy = "Use 8; more iterations come closer to the median."
    num_iterations = check_argument(name, "num_iterations", num_iterations, COUNT, remedy=remedy)
    remedy = "Use 1e-6: it only prevents a division by 0."
    smoothing = check_argument(name, "smoothing", smoothing, POSITIVE, remedy=remedy)

    def combine(updates: chex.ArrayTree, weights: Weights) -> chex.ArrayTree:
        if weights is None:
            weights = jnp.ones(num_participants())
        taken, finite_weights, norms = federated_map(_take, updates, weights)

        def average(
            distances: Float[Array, " participants"], least: Float[Array, ""] | float
        ) -> chex.ArrayTree:
            def attract(weight: Float[Array, ""], distance: Float[Array, ""]) -> Float[Array, ""]:
                return weight / jnp.maximum(distance, least)

            return federated_mean(taken, federated_map(attract, finite_weights, distances))

        def iterate(_: jax.Array, v: chex.ArrayTree) -> chex.ArrayTree:
            def distance(update: chex.ArrayTree) -> Float[Array, ""]:
                return optax.tree.norm(optax.tree.sub(update, v))

            return average(federated_map(distance, taken), smoothing)

        median_norm = _weighted_median(known_to_all(norms), known_to_all(finite_weights))
        first = average(norms, jnp.maximum(median_norm, smoothing))
        v = jax.lax.fori_loop(0, num_iterations, iterate, first)
        return jax.tree.map(lambda m, u: m.astype(mean_dtype(u)), v, updates)

    return without_state(combine, robust=True)


def _take(
    update: chex.ArrayTree, weight: Num[Array, ""]
) -> tuple[chex.ArrayTree, Float[Array, ""], Float[Array, ""]]:
    """Return an update in float32, its weight and its norm; all 0 if the norm is not finite."""
    norm = optax.tree.norm(jax.tree.map(lambda u: u.astype(jnp.float32), update))
    is_taken = jnp.isfinite(norm) & (weight > 0)
    return (
        select(is_taken, update, jnp.float32),
        jnp.where(is_taken, weight.astype(jnp.float32), 0.0),
        jnp.where(is_taken, norm, 0.0),
    )


def _weighted_median(
    values: Float[Array, " participants"], weights: Float[Array, " participants"]
) -> Float[Array, ""]:
    """Return the smallest value such that the values up to it have half of the total weight."""
    order = jnp.argsort(values)
    reached = jnp.cumsum(weights[order])
    return values[order][jnp.argmax(reached >= reached[-1] / 2)]
