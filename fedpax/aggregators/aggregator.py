"""The contract of an aggregator, and the plain mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from fedpax.aggregators.privacy_accounting import PrivacyAccountant
from fedpax.errors import ArgumentTypeError
from fedpax.primitives import federated_broadcast, federated_map, federated_mean, federated_sum
from fedpax.primitives.mean import count_participants
from fedpax.primitives.placement import resolve_placement

Weights: TypeAlias = Num[Array, " participants"] | None
"""The weights of participants, at least 0; 0 marks an absent one. None: all are equal."""


class Aggregator(NamedTuple):
    """A rule that combines the participants' updates into one, as a pair of pure functions.

    Both run inside a fedpax program. A method, such as `fedavg(..., aggregator=...)`, calls `init`
    once and `aggregate` once a round.

    Attributes:
        init: `params -> state`, a NamedTuple of server values and placed values (such as
            error-feedback residuals, a leading axis of the placement's size).
        aggregate: `(state, updates, weights) -> (aggregated, state, metrics)`. `updates` is a
            placed pytree `[participants, ...]` of the structure of `params`, such as the
            pseudo-gradients x - y_i. `weights` are numbers `[participants]`, at least 0, or None
            for equal weights. `aggregated` is a server value of the structure of `params`,
            `metrics` a dict of scalars. An aggregator with two transfers calls
            `sent_values.work_under_transfer` after each.
        needs_all: True if the aggregate needs all updates at once, as for a median. An asynchronous
            method then raises.
        tolerates_non_finite: True if the aggregate stays finite beside an update with NaN or
            infinity. Each metric is then the mean over the finite values, and
            `"non_finite_participants"` counts the other participants. Default False: a NaN makes
            the model and the loss NaN.
        acts_when_all_absent: True if the server must step even if all participants are absent, as
            along the noise of a private mean. Default False: such a round changes neither the model
            nor the server optimizer's state.
        accountant: computes the metric `"epsilon"`.
        counts_alike: True if weights above 0 have no other effect, as in a median.
        limits: `number of participants -> {argument: its largest value}`.

    Example:
        >>> import fedpax
        >>> import jax.numpy as jnp
        >>> aggregator = mean()
        >>> @fedpax.program(clients=2)
        ... def average(updates, weights):
        ...     aggregated, state, metrics = aggregator.aggregate(
        ...         aggregator.init(None), updates, weights)
        ...     return aggregated
        >>> average(jnp.array([1.0, 5.0]), jnp.array([3, 1])).item()
        2.0
    """

    init: Callable[[chex.ArrayTree], chex.ArrayTree]
    aggregate: Callable[
        [chex.ArrayTree, chex.ArrayTree, Weights],
        tuple[chex.ArrayTree, chex.ArrayTree, dict[str, jax.Array]],
    ]
    needs_all: bool = False
    tolerates_non_finite: bool = False
    acts_when_all_absent: bool = False
    accountant: PrivacyAccountant | None = None
    counts_alike: bool = False
    limits: Callable[[int], Mapping[str, int]] | None = None


class EmptyState(NamedTuple):
    """The state of an aggregator without state."""


def mean() -> Aggregator:
    """Average the updates by weight: `sum_i w_i u_i / sum_i w_i`, in their own dtype.

    Returns:
        An aggregator without state and metrics. Weights are used as in `federated_mean`.

    Example:
        >>> mean().init(None)
        EmptyState()
    """
    return _MEAN


def without_epsilon(aggregator: Aggregator) -> Aggregator:
    """Remove the metric and the accountant of epsilon, for use beside sums without noise."""
    if aggregator.accountant is None:
        return aggregator

    def aggregate(
        state: chex.ArrayTree, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, chex.ArrayTree, dict[str, jax.Array]]:
        aggregated, state, metrics = aggregator.aggregate(state, updates, weights)
        return aggregated, state, {n: x for n, x in metrics.items() if n != "epsilon"}

    return aggregator._replace(aggregate=aggregate, accountant=None)


def without_state(
    combine: Callable[[chex.ArrayTree, Weights], chex.ArrayTree],
    *,
    robust: bool = False,
    counts_alike: bool = False,
    limits: Callable[[int], Mapping[str, int]] | None = None,
) -> Aggregator:
    """Make an aggregator without metrics; a robust one needs all updates, and stays finite."""

    def aggregate(
        state: EmptyState, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, EmptyState, dict[str, jax.Array]]:
        return combine(updates, weights) if jax.tree.leaves(updates) else updates, state, {}

    return Aggregator(
        lambda params: EmptyState(),
        aggregate,
        needs_all=robust,
        tolerates_non_finite=robust,
        counts_alike=counts_alike,
        limits=limits,
    )


_MEAN = without_state(federated_mean)  # one for all calls, so that means are equal


def join_metrics(
    own: Mapping[str, jax.Array], later: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Join a stage's metrics with those of later stages, which get a number if names are equal."""
    joined = dict(own)
    for name, value in later.items():
        base, _, digits = name.rpartition("_")
        base, number = (base, int(digits)) if digits.isdecimal() else (name, 1)
        while name in joined:
            number += 1
            name = f"{base}_{number}"
        joined[name] = value
    return joined


# ---- weights of 0, which mark absent participants


def num_participants() -> int:
    """Return the number of participants whose updates are aggregated. Inside a program."""
    return resolve_placement("aggregate", None).placement.size


def count_all() -> Float[Array, ""]:
    """Return the number of participants as an array; in `fedpax.stages`, of those that answer."""
    return count_participants(resolve_placement("aggregate", None).placement)


def mean_dtype(leaf: jax.Array) -> jnp.dtype:
    """Return the dtype of a leaf's mean, as in `federated_mean`: float32 for integers."""
    return leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def present(weights: Weights) -> Bool[Array, " participants"]:
    """Return which participants have a weight above 0, and not NaN. Inside a program."""
    if weights is None:
        return federated_broadcast(True)
    return jnp.asarray(weights) > 0


def select(
    taken: Bool[Array, ""], update: chex.ArrayTree, dtype: jax.typing.DTypeLike | None = None
) -> chex.ArrayTree:
    """Return an update, or zeros where it is not taken, even for NaN and infinity."""
    return jax.tree.map(
        lambda u: jnp.where(taken, u, jnp.zeros_like(u)).astype(dtype or u.dtype), update
    )


# ---- checks and weights of updates that are encoded before they are averaged


def check_floats(function: str, updates: chex.ArrayTree) -> None:
    """Check that updates are arrays of floats."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ArgumentTypeError(
                f"{function}(): updates{jax.tree_util.keystr(path)} has dtype "
                f"{jnp.result_type(leaf)}, expected floats. Use fedpax.aggregators.mean() for "
                "other dtypes."
            )


def normalized_weights(weights: Num[Array, " participants"]) -> Float[Array, " participants"]:
    """Scale weights to a mean of 1. Inside a program."""
    # All are 0 where the weights sum to 0, and NaN where their sum overflows.
    total, n = federated_sum(weights.astype(jnp.float32)), weights.shape[0]
    scale = jnp.where(total == 0, 0.0, n / jnp.where(total == 0, 1.0, total))
    scale = jnp.where(jnp.isinf(total), jnp.nan, scale)
    return federated_map(lambda w: w.astype(jnp.float32) * scale, weights)


# ---- chains of transformations that end in an aggregator

AggregatorTransformation: TypeAlias = Callable[[Aggregator], Aggregator]
"""A function from an aggregator to another one, such as `clip_by_norm(1.0)`.

What it does to the updates before it calls the inner aggregator happens on the participants. What
it does to the aggregate happens on the server.
"""


def chain(*stages: AggregatorTransformation | Aggregator) -> Aggregator:
    """Chain transformations and the aggregator that they end in, as `optax.chain` does.

    `chain(first, second, aggregator)` is `first(second(aggregator))`.

    Args:
        *stages: any number of transformations, then one aggregator.

    Returns:
        The aggregator. Each stage's state contains the next stage's state. The metrics are those of
        all stages. The k-th one of the same name ends in `_k`, such as `"clipped_fraction_2"`.

    Raises:
        TypeError: the last stage is not an `Aggregator`, or an earlier stage is one.

    Example:
        >>> import fedpax
        >>> import jax.numpy as jnp
        >>> from fedpax.aggregators import clip_by_norm, mean
        >>> aggregator = chain(clip_by_norm(2.0), mean())
        >>> @fedpax.program(clients=2)
        ... def average(updates):
        ...     return aggregator.aggregate(aggregator.init(None), updates, None)[0]
        >>> average(jnp.array([1.0, 5.0])).item()
        1.5
    """
    for i, stage in enumerate(stages[:-1]):
        if isinstance(stage, Aggregator) or not callable(stage):
            raise ArgumentTypeError(
                f"chain(): stage {i} is {_describe(stage)}, expected a transformation such as "
                "clip_by_norm(1.0). Put the aggregator last."
            )
    if not stages or not isinstance(stages[-1], Aggregator):
        last = _describe(stages[-1]) if stages else "missing"
        raise ArgumentTypeError(
            f"chain(): the last stage is {last}, expected an aggregator. Add mean() at the end."
        )
    aggregator = stages[-1]
    for transform in reversed(stages[:-1]):
        aggregator = transform(aggregator)
    combine = stages[-1]
    return aggregator._replace(needs_all=combine.needs_all)


def _describe(stage: object) -> str:
    return "an Aggregator" if isinstance(stage, Aggregator) else f"a {type(stage).__name__}"
