"""FedAvg, and FedOpt: FedAvg with any optimizer on the server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import optax

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.local_steps import local_update
from fedpax.algorithms.parts.participation import participant_weights, rematerialized_map
from fedpax.algorithms.parts.server import make_server
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class FedAvgState(NamedTuple):
    """The state of FedAvg."""

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree


def fedavg(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[FedAvgState]:
    """Average clients' pseudo-gradients by weight, and step along the average on the server.

    Each client i starts from the server's model x and takes one optimizer step per batch, ending at
    y_i; x - y_i is its pseudo-gradient. With n_i examples per client, the server's is

        g = sum_i n_i (x - y_i) / sum_i n_i.

    The server optimizer steps along g. SGD with learning rate 1, the default, is FedAvg; with
    momentum it is FedAvgM; `server_adagrad`, `server_adam` and `server_yogi` of `fedpax.algorithms`
    give FedAdagrad, FedAdam and FedYogi. The client optimizer starts anew each round.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        cohort_size: number of clients in a round.
        client_optimizer: any optax optimizer.
        server_optimizer: any optax optimizer. Default None: `optax.sgd(1.0)`.
        aggregator: combines the pseudo-gradients x - y_i into g. Default None: their weighted mean.
        chunk_size: number of clients that a device runs at once; see `fedpax.program`. With 1, a
            client runs only its own steps; with more, as many as the longest of its chunk. A
            derivative then recomputes the clients' steps. Default None: all clients at once.

    Returns:
        `init(params)` and `round(state, cohort)`. The leaves of `cohort.batches` are
        `[cohort_size, steps, batch, ...]`; `cohort.num_examples` are the n_i. Metrics, all float32
        scalars: `"loss"` and the metrics of `loss_fn`, averaged over a client's steps and by weight
        over clients, and the aggregator's.

    Raises:
        TypeError: `cohort_size` is not an int, or an optimizer is not optax's; in a round, no
            `fedpax.Cohort`.
        ValueError: `cohort_size` or `chunk_size` below 1; in a round, arrays without an axis of
            size `cohort_size`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp, optax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = fedavg(loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.5))
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> batches = jnp.array([[[1.0]], [[5.0]]])  # two clients, one step, one example
        >>> cohort = fedpax.Cohort(batches, num_examples=jnp.array([3, 1]))
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.params.item(), metrics["loss"].item()
        (2.0, 7.0)

    Reference:
        McMahan et al., arXiv:1602.05629, algorithm 1; Reddi et al., arXiv:2003.00295, algorithm 1.
    """
    server = make_server("fedavg", server_optimizer, aggregator, client_optimizer)

    @program(clients=cohort_size)
    def init(params: Params) -> FedAvgState:
        return FedAvgState(params, *server.init(params))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def fedavg_round(state: FedAvgState, cohort: Cohort) -> tuple[FedAvgState, Metrics]:
        check_cohort("fedavg", cohort, cohort_size)
        local_train: Callable[..., Any] = functools.partial(
            local_update, loss_fn, client_optimizer, state.params
        )
        pseudo_gradients, metrics = rematerialized_map(
            local_train, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        return server.step(state, pseudo_gradients, metrics, participant_weights(cohort))

    return FederatedAlgorithm(init, fedavg_round)
