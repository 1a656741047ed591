"""The geometric median of the updates, by the smoothed Weiszfeld algorithm."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Num

from fedpax.aggregators.aggregator import Aggregator, EmptyState
from fedpax.aggregators.clipping import check_positive
from fedpax.aggregators.krum import check_count
from fedpax.aggregators.presence import num_participants, select
from fedpax.primitives import federated_map, federated_mean


def geometric_median(*, num_iterations: int = 8, smoothing: float = 1e-6) -> Aggregator:
    """Approximate the geometric median: the point with the least sum of distances to the updates.

    The smoothed Weiszfeld algorithm minimizes `sum_i w_i ||u_i - v||` by repeated weighted means.
    It starts at the weighted mean, and then, with smoothing nu, `num_iterations` times:

        b_i = w_i / max(nu, ||u_i - v||);   v <- sum_i b_i u_i / sum_i b_i.

    Participants with less than half of the total weight cannot move it arbitrarily far. Each
    iteration is one weighted mean, an all-reduce: the updates are kept on their participants'
    devices, and nothing else is exchanged. With one of n updates far away, an iteration reduces its
    influence by a factor of about n; to limit the first influence, put `clip_by_norm` in front.

    Args:
        num_iterations: number of iterations after the weighted mean, at least 1. Default 8. The
            paper finds 3 sufficient.
        smoothing: nu, above 0, in the units of the update's norm.

    Returns:
        An aggregator without state and metrics. Weights are those of the sum of distances. An
        update with a NaN or an infinity counts as absent. It is computed in float32, and the result
        has the dtype of the updates; 0 if no participant is present.

    Raises:
        TypeError: `num_iterations` is not an int, or `smoothing` is not a number.
        ValueError: `num_iterations` or `smoothing` is not positive.

    Example:
        >>> import fedpax
        >>> aggregator = geometric_median(num_iterations=20)
        >>> @fedpax.program(clients=3)
        ... def combine(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> median = combine(jnp.array([[0.0, 0.0], [1.0, 1.0], [900.0, 1000.0]]))
        >>> bool(jnp.linalg.norm(median) < 2)
        True

    Reference:
        Pillutla et al., Robust Aggregation for Federated Learning, arXiv:1912.13445, algorithm 2.
    """
    check_count("geometric_median", "num_iterations", num_iterations, 1)
    check_positive("geometric_median", "smoothing", smoothing)

    def init(params: chex.ArrayTree) -> EmptyState:
        return EmptyState()

    def aggregate(
        state: EmptyState, updates: chex.ArrayTree, weights: Num[Array, " participants"] | None
    ) -> tuple[chex.ArrayTree, EmptyState, dict[str, jax.Array]]:
        n = num_participants(updates)
        if not n:
            return updates, state, {}
        if weights is None:
            weights = jnp.ones(n)
        finite, own = federated_map(_only_finite, updates, weights)

        def iterate(_: jax.Array, v: chex.ArrayTree) -> chex.ArrayTree:
            def attract(update: chex.ArrayTree, weight: Float[Array, ""]) -> Float[Array, ""]:
                distance = optax.tree.norm(optax.tree.sub(update, v))
                return weight / jnp.maximum(distance, smoothing)

            return federated_mean(finite, federated_map(attract, finite, own))

        v = jax.lax.fori_loop(0, num_iterations, iterate, federated_mean(finite, own))
        return jax.tree.map(lambda m, u: m.astype(u.dtype), v, updates), state, {}

    return Aggregator(init, aggregate, needs_all=True)


def _only_finite(
    update: chex.ArrayTree, weight: Num[Array, ""]
) -> tuple[chex.ArrayTree, Float[Array, ""]]:
    """Return an update in float32 and its weight; both 0 if a coordinate is not finite."""
    finite = jnp.stack([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(update)])
    taken: Bool[Array, ""] = jnp.all(finite) & (weight != 0)
    return select(taken, update, jnp.float32), jnp.where(taken, weight.astype(jnp.float32), 0.0)
