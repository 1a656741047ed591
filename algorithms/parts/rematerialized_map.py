"""The map over a cohort's clients, whose derivative does not store their local steps."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax

from fedpax.primitives import federated_map
from fedpax.primitives.placement import ChunkSize


def rematerialized_map(
    fn: Callable[..., chex.ArrayTree], *args: chex.ArrayTree, chunk_size: ChunkSize
) -> chex.ArrayTree:
    """Run a function on every client; in chunks, derivatives recompute it. Inside a program."""
    # `chunk_size` promises memory that does not grow with the number of clients. A derivative of
    # `federated_map` stores the residuals of every client if a reduction separates the forward pass
    # from the backward pass, as in each round that averages. Under `jax.checkpoint` the clients run
    # again instead. Without derivatives, the compiled round is the same.
    #
    # `federated_map` does not do this by itself, because a gradient that needs no result of a
    # reduction stores nothing and would pay for a second forward pass.
    return federated_map(fn if chunk_size is None else jax.checkpoint(fn), *args)
