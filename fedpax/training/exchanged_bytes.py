"""Bytes that rounds exchange: of asynchronous rounds from their schedules."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedpax.algorithm import FederatedAlgorithm, Metrics, Params, State
from fedpax.clients.cohort import Cohort

# The length of a loop over arrivals is in its schedule, not in the compiled text. Its collectives
# belong to a simulation.

UPLOADED_BYTES = "uploaded_bytes"
"""Name of the metric: bytes of the updates that participants send to the server in a round."""

BROADCAST_BYTES = "broadcast_bytes"
"""Name of the metric: bytes of the models that the server sends to participants in a round."""

Count = Callable[[Any, Metrics], tuple[Any, Any]]
"""`(schedule, metrics) -> (number of updates, number of models)` of a round."""


def with_exchanged_bytes(
    algorithm: FederatedAlgorithm,
    count: Count,
    *,
    update_bytes: Callable[[Params], float] | None = None,
) -> FederatedAlgorithm:
    """Report `uploaded_bytes` and `broadcast_bytes` of each round, sums over all participants.

    The training loop logs these where the compiled round leaves its bytes unknown.

    Example:
        >>> import optax
        >>> from fedpax.algorithms import async_diloco
        >>> from fedpax.clients import ArrivalOrder
        >>> loss_fn = lambda w, x: (jnp.mean((w - jnp.mean(x)) ** 2), {})
        >>> algorithm = with_exchanged_bytes(
        ...     async_diloco(loss_fn, islands=2, inner_optimizer=optax.sgd(0.5)),
        ...     lambda schedule, metrics: (metrics["arrivals"], jnp.sum(schedule.position >= 0)))
        >>> cohort = Cohort(jnp.ones((2, 1, 3)), schedule=ArrivalOrder(jnp.array([0, -1])))
        >>> _, metrics = algorithm.round(algorithm.init(jnp.zeros(100)), cohort)
        >>> metrics["uploaded_bytes"].item(), metrics["broadcast_bytes"].item()
        (400.0, 400.0)
    """
    size = tree_bytes if update_bytes is None else update_bytes

    def counted_round(state: State, cohort: Cohort, *frozen: Any) -> tuple[State, Metrics]:
        after, metrics = algorithm.round(state, cohort, *frozen)
        updates, models = count(cohort.schedule, metrics)
        uploaded = jnp.float32(size(state.params)) * updates
        broadcast = jnp.float32(tree_bytes(state.params)) * models
        return after, metrics | {UPLOADED_BYTES: uploaded, BROADCAST_BYTES: broadcast}

    return algorithm._replace(round=counted_round)


def tree_bytes(tree: chex.ArrayTree) -> int:
    """Return the bytes of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
