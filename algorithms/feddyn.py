"""FedDyn."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax.numpy as jnp
import optax

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params, Scalar
from fedpax.algorithms.parts.finite_states import keep_finite
from fedpax.algorithms.parts.local_steps import after, local_update, proximal_term
from fedpax.algorithms.parts.method_checks import (
    check_population,
    check_setting,
    cohort_of_population,
    with_distinct_clients,
)
from fedpax.algorithms.parts.participation import (
    mean_metrics,
    participant_weights,
    rematerialized_map,
    takes_part,
)
from fedpax.algorithms.parts.server import as_floats, make_server
from fedpax.algorithms.parts.tree_arithmetic import scale
from fedpax.checks import NON_NEGATIVE
from fedpax.clients import ClientStore, client_store, gather_clients, scatter_clients
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives import federated_map, federated_sum
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class FedDynState(NamedTuple):
    """The state of FedDyn: `drift` is h, the mean of all clients' g_i.

    `client_gradients` are the g_i.
    """

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree
    drift: Params
    client_gradients: ClientStore[Params]


def feddyn(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    num_clients: int,
    client_optimizer: optax.GradientTransformation,
    alpha: Scalar,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[FedDynState]:
    """Train clients on a loss with a linear term that sums their own past updates.

    From the server's model x, each client i of the cohort takes one optimizer step per batch on

        f_i(y) - <g_i, y> + alpha / 2 |y - x|^2,

    ending at y_i, an inexact minimizer. With S of N clients in the cohort,

        g_i <- g_i - alpha (y_i - x)
        h   <- h - alpha S / N mean_i (y_i - x)
        x   <- mean_i y_i - h / alpha.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: S, number of clients in a round.
        num_clients: N, number of clients in the population.
        client_optimizer: any optax optimizer.
        alpha: weight of the regularization, at least 0, possibly traced. With 0, h / alpha counts
            as 0: `fedavg`.
        server_optimizer: steps along x - mean_i y_i + h / alpha, as in `fedavg`.
        aggregator: as in `fedavg`. The result updates x and h.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. All g_i and h start at 0. A round
        needs `cohort.client_ids`. The paper averages uniformly: with `cohort.num_examples`, or an
        inexact aggregator, h is not exactly the mean of the g_i.

    Raises:
        ValueError: `alpha` below 0; `num_clients` below `cohort_size`; in a round,
            `cohort.client_ids` is None; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = feddyn(loss_fn, cohort_size=2, num_clients=2, alpha=1.0,
        ...                    client_optimizer=optax.sgd(0.5))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]), client_ids=jnp.array([1, 0]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item(), state.drift.item()
        (3.0, -1.5)
        >>> state.client_gradients.to_host().tolist()
        [-2.5, -0.5]

    Reference:
        Acar et al., arXiv:2111.04263, algorithm 1.
    """
    check_setting("feddyn", "alpha", alpha, NON_NEGATIVE, remedy="Pass 0.0 for fedavg.")
    check_population("feddyn", cohort_size, num_clients)
    # An aggregator that hides whether any client takes part would hide their number too.
    hides_number = getattr(aggregator, "acts_when_all_absent", False)
    server = make_server(
        "feddyn",
        server_optimizer,
        aggregator,
        client_optimizer,
        sent_exactly="how many of them take part" if hides_number else None,
    )

    @program(clients=cohort_size)
    def init(params: Params) -> FedDynState:
        server_state, zeros = server.init(params), optax.tree.zeros_like(params)
        return FedDynState(params, *server_state, zeros, client_store(zeros, num_clients))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def feddyn_round(state: FedDynState, cohort: Cohort) -> tuple[FedDynState, Metrics]:
        check_cohort("feddyn", cohort, cohort_size)
        cohort, client_ids = cohort_of_population("feddyn", cohort, num_clients)
        x = state.params
        inverse = jnp.where(alpha > 0, 1 / jnp.where(alpha > 0, alpha, 1), 0)

        def local_train(
            client_gradient: Params, batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Params, Metrics, Params]:
            # Up to a constant, both terms are alpha / 2 |y - (x + g_i / alpha)|^2: a step reads one
            # model for them.
            center = optax.tree.add(x, scale(inverse, client_gradient))
            optimizer = after(proximal_term(alpha, center), client_optimizer)
            pseudo_gradient, metrics = local_update(loss_fn, optimizer, x, batches, num_steps)
            gradient = optax.tree.add(client_gradient, scale(alpha, pseudo_gradient))
            return (
                pseudo_gradient,
                metrics,
                keep_finite(server.aggregator, client_gradient, gradient),
            )

        client_gradient = gather_clients(state.client_gradients, client_ids)
        pseudo_gradients, metrics, client_gradient = rematerialized_map(
            local_train, client_gradient, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        weights = as_floats(participant_weights(cohort))
        mean, state, reported = server.aggregate(state, pseudo_gradients, weights)
        present = federated_sum(
            federated_map(lambda here: here.astype(jnp.float32), takes_part(cohort))
        )
        drift = optax.tree.add(state.drift, scale(alpha * present / num_clients, mean))
        # A round without a client moves nothing.
        shift = scale(jnp.where(present > 0, inverse, 0), drift)
        state = server.descend(state, optax.tree.add(mean, shift), weights)
        return state._replace(
            drift=drift,
            client_gradients=scatter_clients(state.client_gradients, client_ids, client_gradient),
        ), mean_metrics(metrics, weights, server.aggregator, reported)

    checked_round = with_distinct_clients("feddyn", feddyn_round)
    return FederatedAlgorithm(init, checked_round, sent_exactly=server.sent_exactly)
