"""FedBuff."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import without_epsilon
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.arrivals import (
    History,
    StalenessFn,
    polynomial_staleness,
    start_history,
)
from fedpax.algorithms.parts.local_steps import local_update
from fedpax.algorithms.parts.participation import participant_weights, rematerialized_map
from fedpax.algorithms.parts.server import make_server
from fedpax.algorithms.parts.tree_arithmetic import scale
from fedpax.checks import COUNT, COUNT_OR_ZERO, check_argument
from fedpax.clients import Arrivals
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives import federated_map
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class FedBuffState(NamedTuple):
    """The state of FedBuff: `history` has the last `max_staleness + 1` versions of the model."""

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree
    history: History


def fedbuff(
    loss_fn: LossFn,
    *,
    buffer_size: int,
    max_staleness: int,
    client_optimizer: optax.GradientTransformation,
    server_optimizer: optax.GradientTransformation | None = None,
    staleness_fn: StalenessFn | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[FedBuffState]:
    """Update the server's model after every K arrivals of clients that train at their own pace.

    Client i trains from version t - s_i of the model to y_i, and arrives when it is version t.
    After K arrivals,

        x_(t+1) = x_t - eta / K sum_i (1 + s_i)^(-1/2) (x_(t - s_i) - y_i).

    A round is one server update, whose K clients train at the same time, as in `fedavg`.
    `fedpax.simulation.buffered_arrivals` computes which clients arrive and their staleness.

    Memory: `max_staleness + 1` versions of the model besides the model, sharded like it.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        buffer_size: K, number of arrivals in a round.
        max_staleness: the largest staleness that is used; a staler update has weight 0. With 0, all
            clients start from the current model.
        client_optimizer: any optax optimizer; it starts anew at each client.
        server_optimizer: as in `fedavg`; the paper's is SGD with learning rate eta.
        staleness_fn: the factor of an update by its staleness. Default None: the paper's
            `polynomial_staleness(0.5)`.
        aggregator: as in `fedavg`. A private one has no metric `"epsilon"`.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`, with `cohort.schedule` an
        `Arrivals` or None. The paper's mean is uniform: leave `cohort.num_examples` None. Metrics:
        with a schedule also the mean `"staleness"`.

    Raises:
        ValueError: `buffer_size` below 1 or `max_staleness` below 0; and as in `fedavg`.

    Example:
        >>> import fedpax, jax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = fedbuff(
        ...     loss_fn, buffer_size=2, max_staleness=3, client_optimizer=optax.sgd(0.5)
        ... )
        >>> state, step = algorithm.init(jnp.float32(0.0)), jax.jit(algorithm.round)
        >>> batches = jnp.array([[[1.0]], [[5.0]]])  # two clients, one step, one example
        >>> for staleness in ([0, 0], [1, 0]):  # the first client misses one update
        ...     arrivals = fedpax.clients.Arrivals(jnp.array(staleness))
        ...     state, metrics = step(state, fedpax.Cohort(batches, schedule=arrivals))
        >>> round(state.params.item(), 4)  # 3 + (2^(-1/2) (1 - 0) + (5 - 3)) / 2
        4.3536

    Reference:
        Nguyen et al., arXiv:2106.06639, algorithm 1.
    """
    check_argument("fedbuff", "buffer_size", buffer_size, COUNT, remedy="Pass 10, as the paper.")
    remedy = "Pass the largest staleness of the schedule, or 0 for fedavg."
    check_argument("fedbuff", "max_staleness", max_staleness, COUNT_OR_ZERO, remedy=remedy)
    weigh = polynomial_staleness() if staleness_fn is None else staleness_fn
    server = make_server("fedbuff", server_optimizer, aggregator, client_optimizer)
    # A fast client can arrive twice in a round: one client then has two clipped updates in a sum.
    server = server._replace(aggregator=without_epsilon(server.aggregator))

    @program(clients=buffer_size)
    def init(params: Params) -> FedBuffState:
        return FedBuffState(params, *server.init(params), start_history(params, max_staleness + 1))

    @program(clients=buffer_size, chunk_size=chunk_size)
    def fedbuff_round(state: FedBuffState, cohort: Cohort) -> tuple[FedBuffState, Metrics]:
        check_cohort("fedbuff", cohort, buffer_size, Arrivals, size_argument="buffer_size")
        weights = participant_weights(cohort)

        def train_from(
            start: Params, batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Params, Metrics]:
            return local_update(loss_fn, client_optimizer, start, batches, num_steps)

        if cohort.schedule is None:
            updates, metrics = rematerialized_map(
                lambda *inputs: train_from(state.params, *inputs),
                cohort.batches,
                cohort.num_steps,
                chunk_size=chunk_size,
            )
        else:

            def train(staleness: Int[Array, ""], *inputs: chex.ArrayTree) -> tuple[Params, Metrics]:
                update, metrics = train_from(state.history.read(staleness), *inputs)
                stale = staleness.astype(jnp.float32)
                return scale(weigh(stale), update), metrics | {"staleness": stale}

            staleness = cohort.schedule.staleness
            updates, metrics = rematerialized_map(
                train, staleness, cohort.batches, cohort.num_steps, chunk_size=chunk_size
            )
            weights = federated_map(
                lambda s, weight: jnp.where(s <= max_staleness, weight, 0.0),
                staleness,
                jnp.ones(buffer_size) if weights is None else weights,
            )
        state, metrics = server.step(state, updates, metrics, weights)
        return state._replace(history=state.history.append(state.params)), metrics

    return FederatedAlgorithm(init, fedbuff_round)
