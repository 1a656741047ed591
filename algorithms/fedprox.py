"""FedProx."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optax

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params, Scalar
from fedpax.algorithms.fedavg import FedAvgState
from fedpax.algorithms.parts.local_steps import after, local_update, proximal_term
from fedpax.algorithms.parts.method_checks import check_setting
from fedpax.algorithms.parts.participation import participant_weights, rematerialized_map
from fedpax.algorithms.parts.server import make_server
from fedpax.checks import NON_NEGATIVE
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


def fedprox(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    mu: Scalar,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[FedAvgState]:
    """Train clients on their loss plus `mu / 2 |y - x|^2`, then average as FedAvg does.

    From the server's model x, each client i takes one optimizer step per batch on

        f_i(y) + mu / 2 |y - x|^2,

    ending at y_i. The server averages as in `fedavg`.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients in a round.
        client_optimizer: any optax optimizer.
        mu: weight of the proximal term, at least 0, possibly traced. With 0 it is `fedavg`.
        server_optimizer: as in `fedavg`.
        aggregator: as in `fedavg`.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. The reported loss is `loss_fn`'s,
        without the proximal term. With clients drawn uniformly, weigh by `cohort.num_examples`.

    Raises:
        ValueError: `mu` below 0; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = fedprox(loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.5), mu=1.0)
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]] * 50, [[5.0]] * 50]))  # 50 steps each
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> round(state.params.item(), 4)  # half the way from 0 to the mean of 1 and 5
        1.5

    Reference:
        Li et al., arXiv:1812.06127, algorithm 2.
    """
    check_setting("fedprox", "mu", mu, NON_NEGATIVE, remedy="Pass 0.0 for fedavg.")
    server = make_server("fedprox", server_optimizer, aggregator, client_optimizer)

    @program(clients=cohort_size)
    def init(params: Params) -> FedAvgState:
        return FedAvgState(params, *server.init(params))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def fedprox_round(state: FedAvgState, cohort: Cohort) -> tuple[FedAvgState, Metrics]:
        check_cohort("fedprox", cohort, cohort_size)
        x = state.params
        optimizer = after(proximal_term(mu, x), client_optimizer)
        local_train: Callable[..., Any] = functools.partial(local_update, loss_fn, optimizer, x)
        pseudo_gradients, metrics = rematerialized_map(
            local_train, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        return server.step(state, pseudo_gradients, metrics, participant_weights(cohort))

    return FederatedAlgorithm(init, fedprox_round)
