"""The blocks of a client store's rows on devices: layout, and rows read and written by the host."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int64

PIECE_BYTES = 1 << 26
"""The most bytes of rows that are sent to the devices at once."""


class RowBlocks(NamedTuple):
    """The layout of the leaves of a store: equal blocks of rows over some axes of a mesh."""

    mesh: Mesh
    specs: tuple[P, ...]  # of each leaf
    axes: tuple[str, ...]  # the mesh axes that shard the rows
    num_rows: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def block_rows(self) -> int:
        """Number of rows in a block."""
        return self.num_rows // self.num_blocks


def row_blocks(leaves: list[Any]) -> RowBlocks | None:
    """Return the layout of arrays `[rows, ...]`; None if they have no common one on devices."""
    layouts = [_layout(leaf.sharding) for leaf in leaves]
    if not layouts or None in layouts:
        return None
    mesh = layouts[0][0]
    axes = {names_of(spec[0] if len(spec) else None) for _, spec in layouts}
    if len(axes) > 1 or any(other != mesh for other, _ in layouts):
        return None
    return RowBlocks(mesh, tuple(spec for _, spec in layouts), axes.pop(), leaves[0].shape[0])


def _layout(sharding: Any) -> Any:
    """Return the mesh and the spec of a sharding in the devices' own memory, or None."""
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        sharding = NamedSharding(
            Mesh(np.array([device]), ("rows",)), P(), memory_kind=sharding.memory_kind
        )
    if not isinstance(sharding, NamedSharding):
        return None
    own = next(iter(sharding.mesh.local_devices)).default_memory().kind
    is_own = sharding.memory_kind in (None, own)
    return (sharding.mesh, sharding.spec) if is_own else None


def names_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def take_rows(
    leaves: list[jax.Array], blocks: RowBlocks, row_ids: Int64[np.ndarray, " rows"]
) -> tuple[Int64[np.ndarray, " taken"], list[jax.Array]]:
    """Copy rows on the devices that have them.

    Args:
        leaves: arrays `[rows, ...]`.
        blocks: their layout.
        row_ids: the rows to copy, in increasing order.

    Returns:
        The copied rows' numbers, and the rows. Each block has an equal number of them: -1 in the
        numbers is padding, whose row has no meaning.
    """
    owners = row_ids // blocks.block_rows
    counts = np.bincount(owners, minlength=blocks.num_blocks)
    most = padded_count(int(counts.max(initial=1)), blocks.block_rows)
    taken = np.full((blocks.num_blocks, most), -1, np.int64)
    for block, ids in enumerate(np.split(row_ids, np.cumsum(counts)[:-1])):
        taken[block, : len(ids)] = ids
    first = np.arange(blocks.num_blocks)[:, None] * blocks.block_rows
    local = np.where(taken < 0, 0, taken - first).astype(np.int32).ravel()
    index = jax.make_array_from_callback(
        local.shape, NamedSharding(blocks.mesh, P(blocks.axes or None)), lambda i: local[i]
    )
    return taken.ravel(), _take(blocks)(leaves, index)


def padded_count(count: int, most: int) -> int:
    """Round a number of rows up by at most an eighth: each number compiles a program.

    Example:
        >>> padded_count(5, 100), padded_count(995, 5000), padded_count(99, 100)
        (8, 1024, 100)
    """
    multiple = max(8, 1 << max(0, count.bit_length() - 4))
    return min(-(-count // multiple) * multiple, most)


@functools.lru_cache(maxsize=32)
def _take(blocks: RowBlocks) -> Any:
    specs = list(blocks.specs)

    def on_device(leaves: list[jax.Array], index: jax.Array) -> list[jax.Array]:
        return [_of_bits(_bits(leaf)[index], leaf.dtype) for leaf in leaves]

    return jax.jit(on_devices_of(blocks, on_device, (specs, P(blocks.axes or None)), specs))


def write_rows(
    leaves: list[jax.Array],
    blocks: RowBlocks,
    row_ids: Int64[np.ndarray, " rows"],
    rows: list[np.ndarray],
) -> list[jax.Array]:
    """Overwrite rows of arrays, whose buffers are donated; a row number of -1 is padding."""
    for ids, piece in _pieces(row_ids, rows):
        leaves = _write(blocks)(leaves, ids, piece)
    return leaves


def _pieces(
    row_ids: np.ndarray, rows: list[np.ndarray]
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yield the rows in pieces of equal length, the last one padded."""
    row_bytes = sum(leaf.nbytes for leaf in rows) // max(1, len(row_ids))
    length = padded_count(min(len(row_ids), max(1, PIECE_BYTES // max(1, row_bytes))), 1 << 31)
    for start in range(0, len(row_ids), length):
        ids = row_ids[start : start + length].astype(np.int32)
        rest = length - len(ids)
        yield (
            np.pad(ids, (0, rest), constant_values=-1),
            [
                np.pad(leaf[start : start + length], [(0, rest), *[(0, 0)] * (leaf.ndim - 1)])
                for leaf in rows
            ],
        )


@functools.lru_cache(maxsize=32)
def _write(blocks: RowBlocks) -> Any:
    specs = list(blocks.specs)
    piece_specs = [P(None, *spec[1:]) for spec in specs]

    def on_device(leaves: list[jax.Array], ids: jax.Array, rows: list[Any]) -> list[jax.Array]:
        local = ids - (jax.lax.axis_index(blocks.axes) if blocks.axes else 0) * blocks.block_rows
        # A negative index would count from the end.
        local = jnp.where((ids >= 0) & (local >= 0), local, blocks.block_rows)
        return [
            _of_bits(_bits(leaf).at[local].set(_bits(new), mode="drop"), leaf.dtype)
            for leaf, new in zip(leaves, rows, strict=True)
        ]

    mapped = on_devices_of(blocks, on_device, (specs, P(), piece_specs), specs)
    return jax.jit(mapped, donate_argnums=0)


def _bits(leaf: jax.Array) -> jax.Array:
    """View narrow floats as integers: XLA can copy them as wider floats, with another NaN."""
    bits = jax.dtypes.itemsize_bits(leaf.dtype)
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and bits in (8, 16)
    return jax.lax.bitcast_convert_type(leaf, f"uint{bits}") if is_narrow else leaf


def _of_bits(leaf: jax.Array, dtype: Any) -> jax.Array:
    return leaf if leaf.dtype == dtype else jax.lax.bitcast_convert_type(leaf, dtype)


def on_devices_of(blocks: RowBlocks, fn: Any, in_specs: Any, out_specs: Any) -> Any:
    """Map a function over all devices of a layout's mesh."""
    return jax.shard_map(
        fn, mesh=blocks.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
