"""One FedAvg round, implemented with fedpax, with DrJAX, with `jax.vmap` and with a loop.

Each function takes `local_train(params, batches) -> update` and the number of clients, and makes
`round(params, batches, num_examples) -> params`: the parameters plus the weighted mean of the
updates. The round runs under a mesh with an axis `clients`.
"""

from collections.abc import Callable
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import fedpax
from fedpax.algorithm import Params
from fedpax.primitives.placement import ChunkSize

NumExamples: TypeAlias = Float[Array, " clients"]
LocalTrain: TypeAlias = Callable[[Params, chex.ArrayTree], Params]
Round: TypeAlias = Callable[[Params, chex.ArrayTree, jax.Array], Params]


def fedpax_round(local_train: LocalTrain, clients: int, chunk_size: ChunkSize) -> Round:
    """Make the round with fedpax; a device runs `chunk_size` clients at once."""

    @fedpax.program(clients=clients, chunk_size=chunk_size)
    def fedavg_round(params: Params, batches: chex.ArrayTree, num_examples: NumExamples) -> Params:
        at_clients = fedpax.federated_broadcast(params)
        update = fedpax.federated_map(local_train, at_clients, batches)
        return _add(params, fedpax.federated_mean(update, weights=num_examples))

    return fedavg_round


def drjax_round(local_train: LocalTrain, clients: int) -> Round:
    """Make the round with DrJAX, which takes one array of weights per leaf."""
    import drjax

    @drjax.program(clients=clients)
    def fedavg_round(params: Params, batches: chex.ArrayTree, num_examples: NumExamples) -> Params:
        update = drjax.map_fn(local_train, (drjax.broadcast(params), batches))
        weights = jax.tree.map(lambda _: num_examples, update)
        return _add(params, drjax.reduce_weighted_mean(update, weights))

    return fedavg_round


def vmap_round(local_train: LocalTrain, clients: int) -> Round:
    """Make the round as one `jax.vmap` over all clients; the compiler partitions it."""
    del clients

    def fedavg_round(params: Params, batches: chex.ArrayTree, num_examples: NumExamples) -> Params:
        update = jax.vmap(local_train, in_axes=(None, 0))(params, batches)
        share = num_examples / jnp.sum(num_examples)
        return _add(params, jax.tree.map(lambda c: jnp.tensordot(share, c, 1), update))

    return fedavg_round


def scan_round(local_train: LocalTrain, clients: int) -> Round:
    """Make the round as a loop over the clients of a device, with one all-reduce at the end.

    This is the lower limit of memory: no copies of the parameters and no client's update is stored.
    """
    del clients

    def on_device(params: Params, batches: chex.ArrayTree, num_examples: NumExamples) -> Params:
        # Varying over devices: otherwise JAX sums the gradients of all clients.
        varying = jax.tree.map(lambda p: jax.lax.pcast(p, "clients", to="varying"), params)

        def add(total: Params, client: tuple[chex.ArrayTree, jax.Array]) -> tuple[Params, None]:
            batches, weight = client
            update = local_train(varying, batches)
            return jax.tree.map(lambda t, c: t + weight * c, total, update), None

        zeros = jax.tree.map(jnp.zeros_like, varying)
        total, _ = jax.lax.scan(add, zeros, (batches, num_examples))
        total, weight = jax.lax.psum((total, jnp.sum(num_examples)), "clients")
        return _add(params, jax.tree.map(lambda t: t / weight, total))

    specs = (P(), P("clients"), P("clients"))
    return jax.shard_map(on_device, in_specs=specs, out_specs=P())


def _add(params: Params, update: Params) -> Params:
    return jax.tree.map(jnp.add, params, update)
