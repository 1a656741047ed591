"""Rows of clients: a loop over a cohort reads and writes them in the store of all clients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.primitives.row_buffer import read_rows_at


class ClientRows(NamedTuple):
    """The states of a cohort, as rows of an array of all clients.

    Attributes:
        rows: array `[clients, ...]`.
        client_ids: integers `[cohort]`, below `clients`, different from one another; negative where
            a client is absent. An absent client reads zeros and writes nothing.
    """

    rows: Any
    client_ids: Any

    def read(self, start: Any, size: int) -> jax.Array:
        """Read the states of `size` clients, before the same iteration of a loop writes them."""
        ids = jax.lax.dynamic_slice_in_dim(self.client_ids, jnp.int32(start), size)
        states = read_rows_at(self.rows, jnp.maximum(ids, 0))
        is_present = (ids >= 0).reshape(-1, *[1] * (states.ndim - 1))
        return jnp.where(is_present, states, jnp.zeros((), states.dtype))

    def write(self, start: Any, states: jax.Array) -> jax.Array:
        """Return the rows with the states of clients from place `start` of the cohort on."""
        ids = jax.lax.dynamic_slice_in_dim(self.client_ids, jnp.int32(start), len(states))
        return put_rows(self.rows, ids, states, 0)


def take_rows(rows: jax.Array, client_ids: jax.Array, start: Any, fallback: Any) -> jax.Array:
    """Read the clients whose rows are here, from client `start` on; `fallback` for the others."""
    index, is_here = _row_index(rows, client_ids, start)
    states = rows[jnp.where(is_here, index, 0)]
    fallback = jnp.asarray(fallback, rows.dtype)
    return jnp.where(is_here.reshape(-1, *[1] * (rows.ndim - 1)), states, fallback)


def put_rows(rows: jax.Array, client_ids: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    """Write the clients whose rows are here, the first being client `start`; drop the others."""
    index, is_here = _row_index(rows, client_ids, start)
    dropped = len(rows) + jnp.arange(len(index))
    # Unique indices have a derivative on explicit meshes too; JAX has none for others.
    return rows.at[jnp.where(is_here, index, dropped)].set(new, mode="drop", unique_indices=True)


def _row_index(rows: jax.Array, client_ids: jax.Array, start: Any) -> tuple[jax.Array, jax.Array]:
    """Return each client's index among the rows from client `start` on, and whether it is there."""
    index = client_ids - start
    return index, (client_ids >= 0) & (index >= 0) & (index < len(rows))
