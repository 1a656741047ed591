"""Rows of clients: a loop over a cohort reads and writes them in the store of all clients."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fedpax.primitives.layout import unplaced_aval

MOVED_ROWS = "fedpax_moved_rows"
"""The attribute of collectives that run only if rows of a cohort's clients have to move."""


class ClientRows(NamedTuple):
    """The states of a cohort: rows of an array `[clients, ...]`, or of a device's block of it.

    `client_ids` are integers `[cohort]`, the whole cohort's on each device, each once. An absent
    client has a negative one: it reads zeros and writes nothing.
    """

    rows: Any
    client_ids: Any


class RowRing(NamedTuple):
    """The devices that share the rows and the cohort in equal blocks, inside a `shard_map`."""

    axis: str
    devices: int

    def pass_on(self, states: Sequence[jax.Array], by: int) -> list[jax.Array]:
        """Send each device's states to the device that follows by 1, or precedes by -1."""
        pairs = [(d, (d + by) % self.devices) for d in range(self.devices)]
        passed = list(states)
        for together in _sent_together(states):
            if len(together) == 1:
                passed[together[0]] = jax.lax.ppermute(states[together[0]], self.axis, pairs)
                continue
            joined = jnp.concatenate([states[i].ravel() for i in together])
            ends = np.cumsum([states[i].size for i in together])
            parts = jnp.split(jax.lax.ppermute(joined, self.axis, pairs), ends[:-1])
            for i, part in zip(together, parts, strict=True):
                passed[i] = part.reshape(states[i].shape)
        return passed


SMALL_STATE = 1 << 16
"""The most bytes of a state that is sent together with others of its dtype."""


def _sent_together(states: Sequence[jax.Array]) -> list[list[int]]:
    """Return the places of the states of each collective, which waits for all devices."""
    # Other axes can shard a state too: joined, it would be gathered from them.
    mesh = jax.sharding.get_abstract_mesh()
    other = math.prod(mesh.shape[name] for name in (*mesh.auto_axes, *mesh.explicit_axes))
    groups: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        is_small = other == 1 and state.nbytes <= SMALL_STATE
        groups.setdefault(state.dtype if is_small else i, []).append(i)
    return [*groups.values()]


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
        pairs = zip(chunks, states, strict=True)
        return [chunk.take(hops - hop, state) for chunk, state in pairs]

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
        triples = zip(chunks, buffers, states, strict=True)
        return [chunk.put(hop, rows, new) for chunk, rows, new in triples]

    buffers = [value.rows for value in values]
    if ring is None:
        return write(0, buffers, states)

    def body(hop: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        states = ring.pass_on(carry[1], -1)
        return write(hop, carry[0], states), states

    hops = _hops(chunks, ring, in_loop)
    if in_loop:
        # XLA for CPU fuses this write with the code of the states, and computes them again for the
        # ring. Nothing is fused into a loop whose length it does not know.
        once = jax.lax.platform_dependent(
            hops, cpu=lambda hops: jnp.minimum(hops, 0) + 1, default=jnp.ones_like
        )
        buffers = jax.lax.fori_loop(0, once, lambda _, rows: write(0, rows, states), buffers)
    else:
        buffers = write(0, buffers, states)
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


# ---- buffers whose rows a loop over participants reads and overwrites


def has_typed_mesh(x: jax.Array) -> bool:
    """Return whether an array's type has the mesh that explicit axes need; NumPy's has none."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return not (explicit and jax.typeof(x).sharding.mesh.empty)


def empty_rows(participants: int, aval: Any) -> jax.Array:
    """Return an uninitialized array `[participants, ...]` for values of the type `aval`."""
    # With explicit axes an array's type has a spec even if nothing is sharded.
    typed = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    spec = P(None, *aval.sharding.spec) if typed else None
    return jax.lax.empty((participants, *aval.shape), aval.dtype, out_sharding=spec)


def read_rows(buffer: jax.Array, start: Any, rows: int) -> jax.Array:
    """Read rows of a loop-carried buffer before they are overwritten in the same iteration."""
    # XLA for CPU may schedule an independent reader after the write, and then copies the whole
    # buffer in each iteration. A conditional, into which nothing is fused, copies the rows once.

    def read(start: jax.Array, buffer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(buffer, start, rows, 0)

    def read_apart(start: jax.Array, buffer: jax.Array) -> jax.Array:
        always = start < buffer.shape[0]  # XLA does not know it
        return jax.lax.cond(always, read, lambda _, b: read(jnp.int32(0), b), start, buffer)

    return jax.lax.platform_dependent(jnp.int32(start), buffer, cpu=read_apart, default=read)


def read_rows_at(buffer: jax.Array, index: jax.Array) -> jax.Array:
    """Read rows by their index, of a loop-carried buffer, before the iteration overwrites them."""
    if len(index) == 1:
        return read_rows(buffer, index[0], 1)

    def read(index: jax.Array, buffer: jax.Array) -> jax.Array:
        return buffer[index]

    def read_apart(index: jax.Array, buffer: jax.Array) -> jax.Array:
        always = index[0] < buffer.shape[0]
        return jax.lax.cond(always, read, lambda i, b: read(0 * i, b), index, buffer)

    return jax.lax.platform_dependent(index, buffer, cpu=read_apart, default=read)


def write_rows(buffer: jax.Array, rows: jax.Array, start: Any, fusible: bool) -> jax.Array:
    """Write rows into a buffer; `fusible`: XLA may fuse the write with what computes the rows."""
    # XLA for CPU can overwrite rows that it has yet to read. Nothing is fused into a loop of two
    # iterations, which XLA does not inline.
    if not has_typed_mesh(rows):
        rows = jax.sharding.reshard(rows, jax.typeof(buffer).sharding.spec)

    def write(_: Any, buffer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start, 0)

    return write(0, buffer) if fusible else jax.lax.fori_loop(0, 2, write, buffer)


class LazySlice(NamedTuple):
    """A slice that a nested loop reads from the full array, without a copy.

    The first axes of `array` belong to placements, the outermost first, and `indices` are int32
    scalars along them. In a pytree of types or of partition specs: their types or specs.
    """

    array: Any
    indices: tuple[Any, ...]


def materialize(value: Any) -> jax.Array:
    """Return a value as an array; slice it out of the full array if it is a `LazySlice`."""
    if not isinstance(value, LazySlice):
        return value
    depth = len(value.indices)
    starts = (*value.indices, *[jnp.int32(0)] * (value.array.ndim - depth))
    sizes = (*[1] * depth, *value.array.shape[depth:])
    return jax.lax.squeeze(jax.lax.dynamic_slice(value.array, starts, sizes), range(depth))


def aval_of_value(value: Any) -> Any:
    """Return the type of an array, or that a `LazySlice` or `ClientRows` stands for."""
    if isinstance(value, ClientRows):
        aval = jax.typeof(value.rows)
        return aval.update(shape=(*value.client_ids.shape, *aval.shape[1:]))
    if not isinstance(value, LazySlice):
        return jax.typeof(value)
    aval = jax.typeof(value.array)
    for _ in value.indices:
        aval = unplaced_aval(aval)
    return aval
