"""The blocks of a client store's rows on devices."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, Int64, UInt32, UInt64

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
    memory = next(iter(sharding.mesh.local_devices)).default_memory().kind
    is_own = sharding.memory_kind in (None, memory)
    return (sharding.mesh, sharding.spec) if is_own else None


def names_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def take_rows(
    leaves: list[jax.Array], blocks: RowBlocks, row_ids: Int64[np.ndarray, " rows"]
) -> tuple[Int64[np.ndarray, " taken"], list[jax.Array]]:
    """Copy rows on the devices that have them."""
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
    """Round a number of rows up by at most an eighth, such as 995 to 1,024."""
    # Each number of rows compiles a program.
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


ROW_MULTIPLE = 8
"""The number of rows is a multiple of this: 1, 2, 4 and 8 devices have arrays of equal shapes."""


def count_rows(num_clients: int, num_devices: int) -> int:
    """Return the number of rows of a store, padding included."""
    multiple = math.lcm(ROW_MULTIPLE, num_devices)
    return -(-num_clients // multiple) * multiple


def home_devices(
    client_ids: Int[np.ndarray, " cohort"], num_clients: int, num_devices: int
) -> Int64[np.ndarray, " cohort"]:
    """Return the device that has each client's row of a `ClientStore`.

    Args:
        client_ids: integers `[cohort]`, as in `gather_clients`; negative where a client is absent.
        num_clients: the size of the population.
        num_devices: the size of the mesh axis of the placement.

    Returns:
        int64 `[cohort]`: the index along this mesh axis; -1 where a client is absent.

    Example:
        >>> home_devices(np.array([0, 11, -1, 12]), num_clients=24, num_devices=2).tolist()
        [0, 0, -1, 1]
    """
    ids = np.asarray(client_ids, np.int64)
    block = count_rows(num_clients, num_devices) // num_devices
    return np.where(ids < 0, -1, ids // block)


def rows_axis(placement: str) -> tuple[str | None, int]:
    """Return the mesh axis that shards the rows, or None if there is none, and its size."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axis_type = types.get(placement, AxisType.Manual)
    # An automatic axis of size 1 shards nothing.
    if axis_type == AxisType.Manual or (axis_type == AxisType.Auto and mesh.shape[placement] == 1):
        return None, 1
    return placement, mesh.shape[placement]


def state_spec(state: jax.Array, axis: str) -> P:
    """Return the explicit axes that shard one client's state, other than the placement's."""
    return P(*(tuple(n for n in _names(e) if n != axis) or None for e in _spec(state)))


def row_specs(rows: Any, axis: str) -> Any:
    """Return the specs of rows, and of a cohort's states beside them."""
    return jax.tree.map(lambda x: P(axis, *_spec(x)[1:]), rows)


def on_devices(fn: Any, in_specs: Any, out_specs: Any) -> Any:
    """Map `fn` over the devices of all mesh axes that the specs name."""
    # A map over the placement's axis alone would gather over each explicit axis of a state.
    specs = jax.tree.leaves((in_specs, out_specs))
    names = {name for spec in specs for entry in spec for name in _names(entry)}
    mapped = jax.shard_map(
        fn, axis_names=names, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return lambda *arguments: mapped(*jax.tree.map(_reshard, arguments, in_specs))


def _reshard(x: jax.Array, spec: P) -> jax.Array:
    """Shard an array over the explicit axes of a spec."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    entries = [tuple(n for n in _names(entry) if n in explicit) or None for entry in spec]
    wanted = [*entries, *[None] * (x.ndim - len(entries))]
    is_there = [_names(entry) for entry in _spec(x)] == [_names(entry) for entry in wanted]
    return x if is_there else jax.sharding.reshard(x, P(*wanted))


def _spec(x: jax.Array) -> P:
    return jax.typeof(x).sharding.spec


def _names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


CHUNK_BYTES = 1 << 20
"""The bytes of rows whose words a device holds at once."""


def row_fingerprints(leaves: list[jax.Array], blocks: RowBlocks) -> UInt64[np.ndarray, " rows"]:
    """Return 64 bits for each row of arrays `[rows, ...]`; all processes call this together."""
    # Rows of other bits have an equal fingerprint with probability 2^-64. Those of two layouts are
    # not comparable.
    words = _fingerprints(blocks)(leaves)
    if jax.process_count() > 1:
        words = multihost_utils.process_allgather(words, tiled=True)
    low, high = np.asarray(words).astype(np.uint64).T
    return low | high << np.uint64(32)


@functools.lru_cache(maxsize=32)
def _fingerprints(blocks: RowBlocks) -> Any:
    # Devices that share a block of rows have parts of each row.
    named = {name for spec in blocks.specs for entry in spec for name in names_of(entry)}
    shared = tuple(name for name in blocks.mesh.axis_names if name in named - {*blocks.axes})

    def on_device(leaves: list[jax.Array]) -> jax.Array:
        part = jax.lax.axis_index(shared) if shared else 0
        total = jnp.zeros((blocks.block_rows, 2), jnp.uint32)
        for number, (leaf, spec) in enumerate(zip(leaves, blocks.specs, strict=True)):
            names = {name for entry in spec[1:] for name in names_of(entry)}
            # A leaf that is not sharded counts once, on the first of these devices.
            copies = tuple(name for name in shared if name not in names)
            is_first = (jax.lax.axis_index(copies) == 0) if copies else True
            salt = jnp.uint32(part * len(leaves) + number)
            total += jnp.where(is_first, _of_block(leaf, salt), 0)
        return jax.lax.psum(total, shared) if shared else total

    mapped = on_devices_of(blocks, on_device, (list(blocks.specs),), P(blocks.axes or None))
    return jax.jit(mapped)


def _of_block(rows: jax.Array, salt: jax.Array) -> UInt32[jax.Array, "rows 2"]:
    """Sum the mixed words of each row, in chunks: whole, the words would need twice the memory."""
    count, size = rows.shape[0], rows.size
    if not size:
        return jnp.zeros((count, 2), jnp.uint32)
    length = max(1, min(count, CHUNK_BYTES * count // rows.nbytes))

    def add_chunk(i: jax.Array, total: jax.Array) -> jax.Array:
        start = jnp.minimum(i * length, count - length)  # the last chunk repeats rows
        chunk = _words(jax.lax.dynamic_slice_in_dim(rows, start, length))
        place = jax.lax.iota(jnp.uint32, chunk.shape[1])
        sums = [
            jnp.sum(_mix(chunk ^ _mix(place ^ _mix(2 * salt + lane))), axis=1, dtype=jnp.uint32)
            for lane in (jnp.uint32(1), jnp.uint32(2))
        ]
        return jax.lax.dynamic_update_slice(total, jnp.stack(sums, axis=1), (start, 0))

    steps = -(-count // length)
    return jax.lax.fori_loop(0, steps, add_chunk, jnp.zeros((count, 2), jnp.uint32))


def _words(rows: jax.Array) -> UInt32[jax.Array, "rows words"]:
    """Return the bits of rows as 32-bit words; different bits are different words."""
    if jnp.issubdtype(rows.dtype, jnp.complexfloating):
        rows = jnp.stack([rows.real, rows.imag], axis=-1)
    bits = 8 if rows.dtype == jnp.bool_ else jax.dtypes.itemsize_bits(rows.dtype)
    if jnp.issubdtype(rows.dtype, jnp.floating) and bits < 8:
        rows, bits = rows.astype(jnp.float32), 32
    if bits >= 32:
        rows = jax.lax.bitcast_convert_type(rows, jnp.uint32)
    elif jnp.issubdtype(rows.dtype, jnp.floating):
        rows = jax.lax.bitcast_convert_type(rows, f"uint{bits}")
    return rows.astype(jnp.uint32).reshape(rows.shape[0], -1)


def _mix(x: jax.Array) -> jax.Array:
    """Map 32 bits one to one to 32 bits that look random."""
    # The constants of https://github.com/skeeto/hash-prospector, lowbias32.
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
