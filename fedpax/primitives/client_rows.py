"""Rows of clients: a loop over a cohort reads and writes them in the store of all clients.

On a mesh, each device has an equal block of the rows. A client's row can be on another device than
the client: then the states of a chunk go around the ring of devices, forward to be read and back to
be written, only as far as the chunk's rows move.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from fedpax.primitives.row_buffer import read_rows_at

MOVED_ROWS = "fedpax_moved_rows"
"""The attribute of collectives that run only if rows of a cohort's clients have to move."""


class ClientRows(NamedTuple):
    """The states of a cohort, as rows of an array of all clients.

    Attributes:
        rows: array `[clients, ...]`; inside a `shard_map`, the device's block of it.
        client_ids: integers `[cohort]`, below `clients`, different from one another; negative where
            a client is absent. An absent client reads zeros and writes nothing. Each device has the
            ids of the whole cohort.
    """

    rows: Any
    client_ids: Any


class RowRing(NamedTuple):
    """The devices that share the rows and the cohort in equal blocks, inside a `shard_map`."""

    axis: str
    devices: int

    def pass_on(self, states: Any, by: int) -> Any:
        """Send each device's states to the device that follows by 1, or precedes by -1."""
        pairs = [(d, (d + by) % self.devices) for d in range(self.devices)]
        return jax.tree.map(lambda state: jax.lax.ppermute(state, self.axis, pairs), states)


def absent_beyond(client_ids: Any, num_clients: Any) -> jax.Array:
    """Replace indices that are not below the size of the population by -1."""
    client_ids = jnp.asarray(client_ids)
    return jnp.where(client_ids < num_clients, client_ids, -1)


def read_clients(
    values: Sequence[ClientRows], start: Any, size: int, ring: RowRing | None, *, in_loop: bool
) -> list[jax.Array]:
    """Read the states of `size` clients, from place `start` of each device's block."""
    chunks = [Chunk(value, start, size, ring) for value in values]
    if ring is None:
        return [chunk.take(0, 0, apart=in_loop) for chunk in chunks]
    hops = _hops(chunks, ring, in_loop)

    def fill(hop: Any, states: Sequence[Any]) -> list[jax.Array]:
        """Add this device's rows to the block that is here: it comes to its device at last."""
        own = zip(chunks, states, strict=True)
        return [chunk.take(hops - hop, state) for chunk, state in own]

    def body(hop: Any, states: list[jax.Array]) -> list[jax.Array]:
        return fill(hop, ring.pass_on(states, 1))

    def read() -> list[jax.Array]:
        return jax.lax.fori_loop(1, hops + 1, body, fill(0, [0] * len(chunks)))

    if not in_loop:
        return read()
    # Rows that are here are copied once.
    with set_xla_metadata(**{MOVED_ROWS: True}):
        return jax.lax.cond(hops > 0, read, lambda: fill(0, [0] * len(chunks)))


def write_clients(
    values: Sequence[ClientRows],
    start: Any,
    states: Sequence[jax.Array],
    ring: RowRing | None,
    *,
    in_loop: bool,
) -> list[jax.Array]:
    """Return the rows with new states; the arguments are as in `read_clients`."""
    chunks = [
        Chunk(value, start, len(new), ring) for value, new in zip(values, states, strict=True)
    ]

    def write(hop: Any, buffers: Sequence[Any], states: Sequence[Any]) -> list[jax.Array]:
        """Write this device's rows from the block that is here, which started at its device."""
        own = zip(chunks, buffers, states, strict=True)
        return [chunk.put(hop, rows, new) for chunk, rows, new in own]

    buffers = write(0, [value.rows for value in values], states)
    if ring is None:
        return buffers

    def body(hop: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        states = ring.pass_on(carry[1], -1)
        return write(hop, carry[0], states), states

    hops = _hops(chunks, ring, in_loop)
    with set_xla_metadata(**{MOVED_ROWS: in_loop}):
        return jax.lax.fori_loop(1, hops + 1, body, (buffers, list(states)))[0]


class Chunk:
    """The clients at the same places of all devices' blocks of the cohort."""

    def __init__(self, value: ClientRows, start: Any, size: int, ring: RowRing | None):
        self.rows = value.rows
        self.devices = 1 if ring is None else ring.devices
        self.device = 0 if ring is None else jax.lax.axis_index(ring.axis)
        blocks = value.client_ids.reshape(self.devices, -1)
        self.ids = jax.lax.dynamic_slice_in_dim(blocks, jnp.int32(start), size, 1)

    def take(self, distance: Any, fallback: Any, apart: bool = False) -> jax.Array:
        """Read the clients of the device `distance` further; `fallback` where no row is here."""
        index, is_here = self._index(distance)
        index = jnp.where(is_here, index, 0)
        states = read_rows_at(self.rows, index) if apart else self.rows[index]
        is_here = is_here.reshape(-1, *[1] * (states.ndim - 1))
        return jnp.where(is_here, states, jnp.asarray(fallback, states.dtype))

    def put(self, distance: Any, rows: jax.Array, new: jax.Array) -> jax.Array:
        """Write the clients of the device `distance` further whose rows are here; drop others."""
        index, is_here = self._index(distance)
        dropped = len(rows) + jnp.arange(len(index))
        index = jnp.where(is_here, index, dropped)
        # Unique indices have a derivative on explicit meshes too; JAX has none for others.
        return rows.at[index].set(new, mode="drop", unique_indices=True)

    def _index(self, distance: Any) -> tuple[jax.Array, jax.Array]:
        """Return each client's index among the rows that are here, and whether it is there."""
        ids = self.ids[(self.device + distance) % self.devices]
        index = ids - self.device * len(self.rows)
        return index, (ids >= 0) & (index >= 0) & (index < len(self.rows))


def _hops(chunks: Sequence[Chunk], ring: RowRing, in_loop: bool) -> Any:
    # Reverse derivatives need a length that is static: the whole ring.
    return count_hops(chunks, ring) if in_loop else ring.devices - 1


def count_hops(chunks: Sequence[Chunk], ring: RowRing) -> jax.Array:
    """Return how many devices the chunks' rows pass, the same number on all devices."""
    hops = jnp.int32(0)
    for chunk in chunks:
        home = chunk.ids // len(chunk.rows)
        distance = (jnp.arange(ring.devices)[:, None] - home) % ring.devices
        farthest = jnp.max(jnp.where(chunk.ids < 0, 0, distance))
        hops = jnp.maximum(hops, farthest.astype(jnp.int32))
    return hops
