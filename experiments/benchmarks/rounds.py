"""One FedAvg round, written with fedpax, with DrJAX, and by hand in two ways.

Each maker takes `local_train(params, batches) -> change` and the number of clients, and makes
`round(params, batches, num_examples) -> params`: parameters plus the weighted mean of the changes.
A mesh with an axis `clients` is set around it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import fedpax

LocalTrain = Callable[[Any, Any], Any]
Round = Callable[[Any, Any, jax.Array], Any]


def fedpax_round(local_train: LocalTrain, clients: int, chunk_size: Any) -> Round:
    """The round with fedpax, `chunk_size` clients at once on a device."""

    @fedpax.program(clients=clients, chunk_size=chunk_size)
    def fedavg_round(params: Any, batches: Any, num_examples: jax.Array) -> Any:
        at_clients = fedpax.federated_broadcast(params)
        change = fedpax.federated_map(local_train, at_clients, batches)
        return _add(params, fedpax.federated_mean(change, weights=num_examples))

    return fedavg_round


def drjax_round(local_train: LocalTrain, clients: int) -> Round:
    """The round with DrJAX, which takes a weight for each leaf."""
    import drjax

    @drjax.program(clients=clients)
    def fedavg_round(params: Any, batches: Any, num_examples: jax.Array) -> Any:
        change = drjax.map_fn(local_train, (drjax.broadcast(params), batches))
        weights = jax.tree.map(lambda _: num_examples, change)
        return _add(params, drjax.reduce_weighted_mean(change, weights))

    return fedavg_round


def vmap_round(local_train: LocalTrain, clients: int) -> Round:
    """The round as one `jax.vmap` over all clients; the compiler lays it out on the mesh."""
    del clients

    def fedavg_round(params: Any, batches: Any, num_examples: jax.Array) -> Any:
        change = jax.vmap(local_train, in_axes=(None, 0))(params, batches)
        share = num_examples / jnp.sum(num_examples)
        return _add(params, jax.tree.map(lambda c: jnp.tensordot(share, c, 1), change))

    return fedavg_round


def scan_round(local_train: LocalTrain, clients: int) -> Round:
    """The round by hand: each device adds up its clients in a loop, and all talk once.

    This is the limit: no copy of the parameters, and no change of a client is stored.
    """
    del clients

    def on_device(params: Any, batches: Any, num_examples: jax.Array) -> Any:
        # Each client's own: else the derivatives of all clients would be summed.
        own = jax.tree.map(lambda p: jax.lax.pcast(p, "clients", to="varying"), params)

        def add(total: Any, client: tuple[Any, jax.Array]) -> tuple[Any, None]:
            batches, weight = client
            change = local_train(own, batches)
            return jax.tree.map(lambda t, c: t + weight * c, total, change), None

        nothing = jax.tree.map(jnp.zeros_like, own)
        total, _ = jax.lax.scan(add, nothing, (batches, num_examples))
        total, weight = jax.lax.psum((total, jnp.sum(num_examples)), "clients")
        return _add(params, jax.tree.map(lambda t: t / weight, total))

    specs = (P(), P("clients"), P("clients"))
    return jax.shard_map(on_device, in_specs=specs, out_specs=P())


def _add(params: Any, change: Any) -> Any:
    return jax.tree.map(jnp.add, params, change)
