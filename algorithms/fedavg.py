"""FedAvg, and FedOpt, which is FedAvg with another server optimizer."""

from typing import Any, NamedTuple

import optax

from fedpax.algorithms.local_steps import LossFn, local_steps, subtract
from fedpax.primitives import federated_map, federated_mean, program
from fedpax.primitives.placement import ChunkSize
from fedpax.training.algorithm import FederatedAlgorithm, Metrics


class FedAvgState(NamedTuple):
    """The server's model and the state of its optimizer."""

    params: Any
    server_optimizer: optax.OptState


def fedavg(
    loss_fn: LossFn,
    *,
    clients: int,
    client_optimizer: optax.GradientTransformation,
    server_optimizer: optax.GradientTransformation | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm:
    """Weighted federated averaging with any optimizer on the server.

    A client i starts from the server's model x and takes a step on each of its batches, which ends
    at y_i. With weights n_i the server's pseudo-gradient is

        g = sum_i n_i (x - y_i) / sum_i n_i,

    and its optimizer steps along it. The default, SGD with learning rate 1, sets x to the weighted
    mean of the y_i: FedAvg. Momentum, Adagrad, Adam and Yogi give FedAvgM, FedAdagrad, FedAdam and
    FedYogi. Clients keep no state; a client's optimizer begins anew each round.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        clients: the number of clients in a round.
        client_optimizer: any optax optimizer.
        server_optimizer: any optax optimizer; None is `optax.sgd(1.0)`.
        chunk_size: how many clients a device runs at once; see `fedpax.program`.

    Returns:
        `init(params)` and `round(state, batches, weights=None, steps=None)`. `batches` is a pytree
        of arrays `[clients, local_steps, batch, ...]`; `weights` an array `[clients]`, such as
        numbers of examples, and None weighs all alike; `steps` an integer array `[clients]`, how
        many steps each client takes, on the first of its batches, and None has all take all. With
        `chunk_size=1` a client costs its own steps, else those of the longest of its chunk.
        A client that takes no step changes nothing: give it weight 0. Metrics, all float32
        scalars: `"loss"` and what `loss_fn` reports, averaged over a client's steps and by weight
        over clients.

    Raises:
        TypeError: `clients` is no int.
        ValueError: `clients` or `chunk_size` below 1; in a round, batches or weights without
            an axis of size `clients`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = fedavg(loss_fn, clients=2, client_optimizer=optax.sgd(0.5))
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> batches = jnp.array([[[1.0]], [[5.0]]])  # two clients, one step, one example
        >>> state, metrics = jax.jit(algorithm.round)(state, batches, jnp.array([3, 1]))
        >>> state.params.item(), metrics["loss"].item()
        (2.0, 7.0)

    Reference:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
        arXiv:1602.05629, algorithm 1; Reddi et al., Adaptive Federated Optimization,
        arXiv:2003.00295, algorithm 1.
    """
    server = optax.sgd(1.0) if server_optimizer is None else server_optimizer

    def init(params: Any) -> FedAvgState:
        return FedAvgState(params, server.init(params))

    @program(clients=clients, chunk_size=chunk_size)
    def fedavg_round(
        state: FedAvgState, batches: Any, weights: Any = None, steps: Any = None
    ) -> tuple[FedAvgState, Metrics]:
        def local_train(batches: Any, steps: Any) -> tuple[Any, Metrics]:
            params, _, metrics = local_steps(
                loss_fn,
                client_optimizer,
                state.params,
                client_optimizer.init(state.params),
                batches,
                steps,
            )
            return subtract(state.params, params), metrics

        change, metrics = federated_map(local_train, batches, steps)
        pseudo_gradient, metrics = federated_mean((change, metrics), weights)
        updates, server_state = server.update(pseudo_gradient, state.server_optimizer, state.params)
        return FedAvgState(optax.apply_updates(state.params, updates), server_state), metrics

    return FederatedAlgorithm(init, fedavg_round)
