"""The map over a cohort's clients, whose derivative does not store their local steps."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax

from fedpax.primitives import federated_map
from fedpax.primitives.placement import ChunkSize


def map_clients(
    fn: Callable[..., chex.ArrayTree], *args: chex.ArrayTree, chunk_size: ChunkSize
) -> chex.ArrayTree:
    """Run a function on every client; in chunks, derivatives recompute it. Inside a program.

    `chunk_size` promises memory that does not grow with the number of clients. A derivative of
    `federated_map` stores the residuals of every client if a reduction separates the forward pass
    from the backward pass, as in each round that averages. Under `jax.checkpoint` the clients run
    again instead. Without derivatives, the compiled round is the same.

    `federated_map` does not do this by itself, because a gradient that needs no result of a
    reduction stores nothing and would pay for a second forward pass.

    Args:
        fn: takes one client's slices, as in `federated_map`.
        *args: placed pytrees of arrays `[clients, ...]`.
        chunk_size: the setting of the program that calls this function.

    Returns:
        The result of `fn`, with an axis of clients in front of every leaf.

    Raises:
        TypeError, ValueError: as in `federated_map`.

    Example:
        >>> import fedpax, jax.numpy as jnp
        >>> @fedpax.program(clients=2, chunk_size=1)
        ... def total(w, x):
        ...     squares = map_clients(lambda x: (w * x) ** 2, x, chunk_size=1)
        ...     return fedpax.federated_sum(squares) ** 2
        >>> jax.grad(total)(1.0, jnp.array([1.0, 2.0])).item()  # of (5 w^2)^2
        100.0
    """
    return federated_map(fn if chunk_size is None else jax.checkpoint(fn), *args)
