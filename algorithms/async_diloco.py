"""Asynchronous DiLoCo."""

from __future__ import annotations

from typing import NamedTuple

import chex
import optax
from jaxtyping import Array, Int

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.arrivals import (
    Combined,
    DelayedNesterov,
    DelayedNesterovState,
    arrivals_aggregator,
    check_delayed_nesterov,
    is_at,
    outer_gradients,
    process_in_order,
)
from fedpax.algorithms.parts.inner_steps import make_outer_gradient, start_islands
from fedpax.algorithms.parts.method_checks import check_optimizer
from fedpax.algorithms.parts.participation import with_reported
from fedpax.algorithms.parts.tree_arithmetic import select
from fedpax.clients import ArrivalOrder
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.primitives import (
    federated_map,
    federated_max,
)
from fedpax.transforms.program import program


class AsyncDiLoCoState(NamedTuple):
    """The state of asynchronous DiLoCo: islands' models and inner optimizers are placed."""

    params: Params
    outer_optimizer_state: DelayedNesterovState
    local_params: Params
    inner_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree | None


def async_diloco(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    period: int | None = None,
    activation: float = 0.0,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[AsyncDiLoCoState]:
    """Apply each outer gradient when it arrives, and the momentum at every N-th arrival.

    Island i trains from the x_(s_i) of its last arrival, and arrives with g = x_(s_i) - y_i at a
    server whose model is now x. Delayed Nesterov with c = 0:

        each arrival:       x <- x - eta g / N;   D <- D + g
        every N-th arrival: m <- beta m + D / N;  x <- x - eta beta m;  D <- 0

    The island continues from the new x with its inner optimizer's state.

    All islands of a round train at the same time, then the server applies their gradients in the
    order of `cohort.schedule`, made by `fedpax.simulation.island_arrivals` with `cohort.num_steps`.
    Without a schedule all arrive together: with N = islands this is `diloco` with Nesterov
    momentum. Arrivals at one position are applied together, before the momentum.

    With an `aggregator`, the sum of the gradients at a position is their number times the
    aggregate.

    Each island holds the model that it trains from. `jax.grad` through a round with a schedule
    raises.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands.
        inner_optimizer: any optax optimizer; the paper uses AdamW.
        learning_rate: eta. Default 0.7.
        momentum: beta, from 0 to 1. Default 0.9.
        period: N, arrivals between two updates of the momentum. Default None: `islands`.
        activation: c, from 0 to 1 / N: the share of the momentum that each arrival applies. Default
            0.0, as in the paper.
        aggregator: combines the gradients that arrive at the same time. Default None: their sum.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `diloco`. `cohort.schedule` is an
        `ArrivalOrder` or None. All arrivals weigh the same; an island without a valid step, or of
        which `cohort.num_examples` is 0, contributes nothing. Metrics are averaged over arriving
        islands, with a schedule `"arrivals"`.

    Raises:
        TypeError: `islands` is not an int, or `inner_optimizer` is not optax's; in a round, a
            schedule of another type.
        ValueError: a setting is out of range; an aggregator that `needs_all`; in a round, batches
            without an axis of size `islands`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = async_diloco(
        ...     loss_fn, islands=2, inner_optimizer=optax.sgd(0.5), learning_rate=1.0, momentum=0.5
        ... )
        >>> state, step = algorithm.init(jnp.float32(0.0)), jax.jit(algorithm.round)
        >>> batches = jnp.array([[[1.0]], [[5.0]]])  # two islands, H = 1; y_i is the example
        >>> order = fedpax.clients.ArrivalOrder(jnp.array([1, 0]))
        >>> state, metrics = step(state, fedpax.Cohort(batches, schedule=order))
        >>> state.params.item()  # 2.5, then 2.5 + 0.5 + 0.5 * 3
        4.5
        >>> state.local_params.tolist()
        [4.5, 2.5]

    Reference:
        Liu et al., arXiv:2401.09135, delayed Nesterov and dynamic local updates.
    """
    check_optimizer("async_diloco", "inner_optimizer", inner_optimizer)
    every = max(islands, 1) if period is None else period
    outer = DelayedNesterov(learning_rate, momentum, every, activation)
    check_delayed_nesterov("async_diloco", "", outer)
    combine = arrivals_aggregator("async_diloco", aggregator, inner_optimizer)

    @program(islands=islands)
    def init(params: Params) -> AsyncDiLoCoState:
        local_params, inner_state = start_islands(params, inner_optimizer)
        return AsyncDiLoCoState(
            params,
            outer.init(params),
            local_params,
            inner_state,
            None if combine is None else combine.init(params),
        )

    @program(islands=islands)
    def async_diloco_round(
        state: AsyncDiLoCoState, cohort: Cohort
    ) -> tuple[AsyncDiLoCoState, Metrics]:
        check_cohort("async_diloco", cohort, islands, ArrivalOrder, size_argument="islands")
        arrivals, inner_state, sends, metrics = outer_gradients(
            make_outer_gradient(loss_fn, inner_optimizer),
            state.local_params,
            state.inner_optimizer_state,
            cohort,
            combine,
        )
        positions = None if cohort.schedule is None else cohort.schedule.position

        def apply(
            k: Int[Array, ""] | None,
            params: Params,
            outer_state: DelayedNesterovState,
            local_params: Params,
            combined: Combined,
        ) -> tuple[Params, DelayedNesterovState, Params, Combined]:
            """Apply the gradients that arrive at position k; None: all of them."""
            arriving = federated_map(lambda s, position: s & is_at(position, k), sends, positions)
            total, count, combined = arrivals.combine(arriving, combined)
            params, outer_state = outer.update(total, count, outer_state, params)
            local_params = federated_map(
                lambda held, position: select(is_at(position, k), params, held),
                local_params,
                positions,
            )
            return params, outer_state, local_params, combined

        params, outer_state, local_params, combined = process_in_order(
            apply,
            (
                state.params,
                state.outer_optimizer_state,
                state.local_params,
                arrivals.start(state.aggregator_state),
            ),
            None if positions is None else federated_max(positions),
        )
        after = AsyncDiLoCoState(params, outer_state, local_params, inner_state, combined.state)
        return after, with_reported(metrics, combined.mean_metrics())

    return FederatedAlgorithm(init, async_diloco_round)
