"""Fingerprints of a client store's rows: rows whose bits change have another fingerprint."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from jaxtyping import UInt32, UInt64

from fedpax.clients.row_blocks import RowBlocks, names_of, on_devices_of

CHUNK_BYTES = 1 << 20
"""The bytes of rows whose words a device holds at once."""


def row_fingerprints(leaves: list[jax.Array], blocks: RowBlocks) -> UInt64[np.ndarray, " rows"]:
    """Return 64 bits for each row of arrays `[rows, ...]`, which depend on all bits of the row.

    Of a row whose bits change, the fingerprint stays with a probability of about 2^-64. Devices
    read their own rows. Fingerprints of two layouts cannot be compared. All processes must call
    this together.

    Example:
        >>> from fedpax.clients.row_blocks import row_blocks
        >>> rows = jnp.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [-0.0, 1.0]])
        >>> prints = row_fingerprints([rows], row_blocks([rows]))
        >>> (prints[0] == prints).tolist()
        [True, False, True, False]
    """
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
            own = {name for entry in spec[1:] for name in names_of(entry)}
            # A leaf that is not sharded counts once, on the first of these devices.
            copies = tuple(name for name in shared if name not in own)
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
