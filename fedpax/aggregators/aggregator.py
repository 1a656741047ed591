"""The contract of an aggregator, and the plain mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import chex
import jax
from jaxtyping import Array, Num

from fedpax.aggregators.privacy_accounting import PrivacyAccountant
from fedpax.primitives import federated_mean

Weights: TypeAlias = Num[Array, " participants"] | None
"""The weights of participants; 0 marks an absent one. None: all have the same weight."""


class Aggregator(NamedTuple):
    """A rule that combines the participants' updates into one, as a pair of pure functions.

    Both run inside a fedpax program. A method calls `init` once and `aggregate` once a round:
    `fedavg(..., aggregator=...)`, `diloco(..., aggregator=...)`.

    Attributes:
        init: `params -> state`, a NamedTuple of server values and placed values (such as
            error-feedback residuals, a leading axis of the placement's size).
        aggregate: `(state, updates, weights) -> (aggregated, state, metrics)`. `updates` is a
            placed pytree `[participants, ...]` of the structure of `params`, such as the
            pseudo-gradients x - y_i of `fedavg` and `diloco`. `weights` are numbers
            `[participants]`, or None for equal weights. `aggregated` is a server value of the
            structure of `params`. `metrics` is a dict of scalars.
        needs_all: True if the aggregate is defined only for the updates of all participants at
            once, as for a median. An asynchronous method, which aggregates each update when it
            arrives, then raises. Default False.
        tolerates_non_finite: True if the aggregate stays finite beside an update with NaN or
            infinity, as for a median. Each metric of a round is then the mean over the participants
            whose value is finite, and `"non_finite_participants"` counts all other present
            participants. Default False: as in a plain mean, a NaN of one participant makes the
            model NaN, and the loss too.
        acts_when_all_absent: True if the server must step in a round in which every participant is
            absent too, as along the noise of a private mean, which hides that no client took part.
            Default False: such a round changes neither the model nor the server optimizer's state.
        accountant: what computes the metric `"epsilon"`, if the aggregator has one. A
            transformation that keeps the guarantee keeps it. Default None.

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


class EmptyState(NamedTuple):
    """The state of an aggregator without state."""


def mean() -> Aggregator:
    """Average the updates by weight: `sum_i w_i u_i / sum_i w_i`, in their own dtype.

    Returns:
        An aggregator without state and metrics. Weights that sum to zero give 0.

    Example:
        >>> mean().init(None)
        EmptyState()
    """
    return without_state(federated_mean)


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
    combine: Callable[[chex.ArrayTree, Weights], chex.ArrayTree], *, robust: bool = False
) -> Aggregator:
    """Make an aggregator without metrics; a robust one needs all updates, and stays finite."""

    def aggregate(
        state: EmptyState, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, EmptyState, dict[str, jax.Array]]:
        return combine(updates, weights) if jax.tree.leaves(updates) else updates, state, {}

    return Aggregator(
        lambda params: EmptyState(), aggregate, needs_all=robust, tolerates_non_finite=robust
    )
