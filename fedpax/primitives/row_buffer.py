"""Buffers whose rows a loop over participants reads and overwrites."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


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
    # XLA for CPU fuses a copy of the slice into each of its readers. It may schedule an independent
    # reader after the write, and then copies the whole buffer in each iteration. It fuses nothing
    # into a conditional, which copies the rows once.

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
    # If that code reads `buffer`, and the result is reshaped outside a loop, XLA for CPU
    # overwrites rows that it has yet to read. Nothing is fused into a loop of two iterations, the
    # shortest that XLA does not inline.
    if not has_typed_mesh(rows):
        rows = jax.sharding.reshard(rows, jax.typeof(buffer).sharding.spec)

    def write(_: Any, buffer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start, 0)

    return write(0, buffer) if fusible else jax.lax.fori_loop(0, 2, write, buffer)
