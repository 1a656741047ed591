"""Clipping of each participant's update."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fedpax.aggregators.aggregator import (
    Aggregator,
    AggregatorTransformation,
    Weights,
    join_metrics,
    mean_dtype,
    present,
    without_epsilon,
)
from fedpax.aggregators.gaussian_noise import quantile_noise
from fedpax.checks import FRACTION, NON_NEGATIVE, POSITIVE, check_argument, check_seed
from fedpax.primitives import federated_map, federated_mean, federated_sum


def clip_by_norm(max_norm: float) -> AggregatorTransformation:
    """Clip each participant's update to a norm: `u_i min(1, C / ||u_i||)`.

    The norm is Euclidean, over all leaves.

    Args:
        max_norm: C, the largest norm, above 0.

    Returns:
        A transformation without state. An update whose norm is infinite or NaN becomes 0. Metrics,
        over present participants: `"clipped_fraction"`, the fraction whose norm is not at most C;
        `"participant_norm"`, the mean of the finite norms before clipping; and
        `"non_finite_updates"`. They are exact: do not publish them with a private mean.

    Raises:
        TypeError: `max_norm` is not a number.
        ValueError: `max_norm` is not positive and finite.

    Example:
        >>> import fedpax
        >>> from fedpax.aggregators import chain, mean
        >>> aggregator = chain(clip_by_norm(1.0), mean())
        >>> @fedpax.program(clients=2)
        ... def average(updates):
        ...     mean, state, metrics = aggregator.aggregate(aggregator.init(None), updates, None)
        ...     return mean, metrics
        >>> clipped_mean, metrics = average(jnp.array([[0.0, 0.5], [0.0, 8.0]]))
        >>> clipped_mean.tolist()  # the mean of [0, 0.5] and [0, 1]
        [0.0, 0.75]
        >>> metrics["clipped_fraction"].item(), metrics["participant_norm"].item()
        (0.5, 4.25)

    Reference:
        Sun et al., arXiv:1911.07963, section 3 (norm bounding).
        McMahan et al., arXiv:1710.06963, section 2 (flat clipping).
    """
    max_norm = check_norm("clip_by_norm", "max_norm", max_norm)

    def transform(inner: Aggregator) -> Aggregator:
        def aggregate(
            state: chex.ArrayTree, updates: chex.ArrayTree, weights: Weights
        ) -> tuple[chex.ArrayTree, chex.ArrayTree, dict[str, jax.Array]]:
            updates, norms = federated_map(lambda u: _clip_and_cast(u, max_norm), updates)
            metrics = _clipping_metrics(norms, max_norm, present(weights))
            aggregated, state, reported = inner.aggregate(state, updates, weights)
            return aggregated, state, join_metrics(metrics, reported)

        return inner._replace(aggregate=aggregate, tolerates_non_finite=True)

    return transform


class AdaptiveClipState(NamedTuple):
    """The state of `adaptive_clip`."""

    max_norm: Float[Array, ""]  # the norm of the next round
    round: Int[Array, ""]  # with the seed it determines the noise
    aggregator_state: chex.ArrayTree


def adaptive_clip(
    *,
    initial_norm: float,
    quantile: float = 0.5,
    learning_rate: float = 0.2,
    count_stddev: float = 0.0,
    seed: int = 0,
) -> AggregatorTransformation:
    """Clip updates to a norm that follows a quantile of the participants' norms.

    With quantile gamma, learning rate eta and m present participants:

        b = (sum_i [||u_i|| <= C] + N(0, count_stddev^2)) / m;   C <- C exp(-eta (b - gamma)).

    Without noise, C changes by a factor of at most exp(eta) per round. `private_mean(quantile=...)`
    is the private mean with this clipping.

    Args:
        initial_norm: C of the first round, above 0.
        quantile: gamma, between 0 and 1.
        learning_rate: eta, at least 0.
        count_stddev: standard deviation of the noise of the count. Default 0: an exact count.
        seed: int, seed of the noise of the count in a simulation.

    Returns:
        A transformation with state `AdaptiveClipState`. It has the metrics of `clip_by_norm`, and
        `"max_norm"`, the C of this round. A private aggregator behind it states no epsilon, which
        would not count what C tells.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:
        >>> import fedpax
        >>> from fedpax.aggregators import chain, mean
        >>> aggregator = chain(adaptive_clip(initial_norm=1.0, quantile=0.75), mean())
        >>> @jax.jit
        ... @fedpax.program(clients=4)
        ... def average(state, updates):
        ...     return aggregator.aggregate(state, updates, None)
        >>> state = aggregator.init(None)
        >>> for _ in range(100):
        ...     _, state, metrics = average(state, jnp.array([2.0, 4.0, 6.0, 8.0]))
        >>> bool(6.0 <= state.max_norm <= 8.0)  # three of four norms are at most C
        True

    Reference:
        Andrew et al., arXiv:1905.03871, algorithm 1, with geometric updates.
    """
    name = "adaptive_clip"
    initial_norm = check_norm(name, "initial_norm", initial_norm)
    quantile = check_quantile(name, quantile)
    learning_rate = check_learning_rate(name, learning_rate)
    remedy = "Use 0.0 for an exact count."
    count_stddev = check_argument(name, "count_stddev", count_stddev, NON_NEGATIVE, remedy=remedy)
    seed = check_seed(name, seed)

    def transform(inner: Aggregator) -> Aggregator:
        inner = without_epsilon(inner)

        def init(params: chex.ArrayTree) -> AdaptiveClipState:
            return AdaptiveClipState(jnp.float32(initial_norm), jnp.int32(0), inner.init(params))

        def aggregate(
            state: AdaptiveClipState, updates: chex.ArrayTree, weights: Weights
        ) -> tuple[chex.ArrayTree, AdaptiveClipState, dict[str, jax.Array]]:
            norm = state.max_norm
            updates, norms = federated_map(lambda u: _clip_and_cast(u, norm), updates)
            taken = present(weights)
            below = federated_map(lambda norm_i, here: here & (norm_i <= norm), norms, taken)
            counted, total = federated_sum((below, taken))
            if count_stddev:
                drawn = quantile_noise(seed, state.round, total.astype(jnp.float32))
                counted = counted + count_stddev * drawn
            fraction = counted / jnp.maximum(total, 1)
            adapted = adapt_norm(norm, fraction, quantile, learning_rate)
            metrics = _clipping_metrics(norms, norm, taken) | {"max_norm": norm}
            aggregated, inner_state, reported = inner.aggregate(
                state.aggregator_state, updates, weights
            )
            new_norm = jnp.where(total == 0, norm, adapted)
            return (
                aggregated,
                AdaptiveClipState(new_norm, state.round + 1, inner_state),
                join_metrics(metrics, reported),
            )

        return inner._replace(init=init, aggregate=aggregate, tolerates_non_finite=True)

    return transform


def adapt_norm(
    norm: Float[Array, ""], fraction: Float[Array, ""], quantile: float, learning_rate: float
) -> Float[Array, ""]:
    """Update a clipping norm geometrically, given the fraction of norms that are at most it."""
    return norm * jnp.exp(-learning_rate * (fraction - quantile))


def clip_update(
    update: chex.ArrayTree, max_norm: float | Float[Array, ""]
) -> tuple[chex.ArrayTree, Float[Array, ""]]:
    """Clip one participant's update, and return it in float32 with its norm before clipping."""
    wide = jax.tree.map(lambda u: u.astype(jnp.float32), update)
    norm = jnp.asarray(optax.tree.norm(wide), jnp.float32)
    scale = jnp.minimum(1.0, max_norm / jnp.where(norm > 0, norm, 1.0))
    clipped = jax.tree.map(lambda u: jnp.where(jnp.isfinite(norm), scale * u, 0.0), wide)
    return clipped, norm


def _clip_and_cast(
    update: chex.ArrayTree, max_norm: float | Float[Array, ""]
) -> tuple[chex.ArrayTree, Float[Array, ""]]:
    clipped, norm = clip_update(update, max_norm)
    return jax.tree.map(lambda c, u: c.astype(mean_dtype(u)), clipped, update), norm


def _clipping_metrics(
    norms: Float[Array, " participants"],
    max_norm: float | Float[Array, ""],
    taken: Bool[Array, " participants"],
) -> dict[str, jax.Array]:
    def measure(norm: Float[Array, ""], here: Bool[Array, ""]) -> tuple[Any, ...]:
        finite = here & jnp.isfinite(norm)
        clipped = (~(norm <= max_norm)).astype(jnp.float32)  # a NaN norm counts as clipped
        return jnp.where(here, clipped, 0.0), norm, finite, here & ~finite

    clipped, norms, finite, non_finite = federated_map(measure, norms, taken)
    return {
        "clipped_fraction": federated_mean(clipped, taken),
        "participant_norm": federated_mean(norms, finite),
        "non_finite_updates": federated_sum(non_finite),
    }


def check_norm(function: str, argument: str, norm: float) -> float:
    """Return a clipping norm, a finite number above 0."""
    remedy = "Use about the median of the norms of updates, such as 1.0."
    return check_argument(function, argument, norm, POSITIVE, remedy=remedy)


def check_quantile(function: str, quantile: float) -> float:
    """Return a quantile, a number from 0 to 1."""
    remedy = "The median is 0.5."
    return check_argument(function, "quantile", quantile, FRACTION, remedy=remedy)


def check_learning_rate(function: str, learning_rate: float) -> float:
    """Return the learning rate of a clipping norm, a finite number of at least 0."""
    remedy = "Use 0.2, as the paper, or 0.0 for a fixed norm."
    return check_argument(function, "learning_rate", learning_rate, NON_NEGATIVE, remedy=remedy)
