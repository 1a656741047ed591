"""Divide the leaves of an update into blocks for a codec, and join blocks to leaves."""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpax.aggregators.codecs.codec import Codec

SMALL_LEAF = 2**16  # entries; gathering a leaf of this size from other devices costs nothing
SHORT_AXIS = 128  # blocks along a shorter axis would have more scales than the codes are worth


class Blocks(NamedTuple):
    """The division of a leaf into blocks."""

    # With n blocks, a block has every n-th entry of the axis, so that dividing the first axis moves
    # no data. The end of the axis may be padded with zeros.

    # the axis that is divided; other axes do not change. None: the leaf is flattened first.
    axis: int | None
    num_blocks: int
    size: int


@functools.lru_cache(maxsize=4096)
def choose_blocks(codec: Codec, shape: tuple[int, ...]) -> Blocks:
    """Choose the blocks of a leaf from its shape alone, so that they are the same on every mesh."""
    # A large leaf is divided along its longest major axis: the minor axis of its words fills the
    # TPU's tiles, and mesh axes can shard it. A small leaf, or one without a long major axis, is
    # flattened. Blocks that do not divide the axis are of about equal size: at most the codec's,
    # its half or its quarter, whichever has the fewest words.
    total = math.prod(shape)
    axis = max(range(max(len(shape) - 1, 1)), key=lambda a: shape[a]) if shape else None
    if axis is None or total <= SMALL_LEAF or shape[axis] < SHORT_AXIS:
        axis, entries = None, max(total, 1)
    else:
        entries = shape[axis]
    whole = entries % codec.block_size == 0
    limits = [codec.block_size >> i for i in range(1 if whole else 3)]
    counts = {-(-entries // limit) for limit in limits if limit}
    sizes = {count: -(-entries // count) for count in counts}
    count = min(counts, key=lambda c: (c * num_words(codec, sizes[c]), c))
    return Blocks(axis, count, sizes[count])


def wire_bits(codec: Codec, updates: chex.ArrayTree) -> int:
    """Count the bits of one participant's encoded update.

    Args:
        codec: the codec.
        updates: one participant's update, or its types.

    Returns:
        The number of bits, scales and padding included.

    Example:
        >>> from fedpax.aggregators.codecs import drive
        >>> params = {"kernel": jax.ShapeDtypeStruct((1024, 4096), "float32")}
        >>> wire_bits(drive(), params) / (1024 * 4096)  # 1 bit, and a float per 1024 entries
        1.03125
    """
    bits = 0
    for leaf in jax.tree.leaves(updates):
        blocks = choose_blocks(codec, tuple(jnp.shape(leaf)))
        rows = 1 if blocks.axis is None else math.prod(leaf.shape) // leaf.shape[blocks.axis]
        bits += 32 * num_words(codec, blocks.size) * blocks.num_blocks * rows
    return bits


@functools.lru_cache(maxsize=4096)
def num_words(codec: Codec, size: int) -> int:
    """Return the number of words of a block."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(codec.encode, key, jax.ShapeDtypeStruct((size,), jnp.float32)).shape[0]


def to_blocks(leaf: Float[Array, "..."], blocks: Blocks) -> Float[Array, "entries ..."]:
    """Divide a leaf into blocks."""
    axis = blocks.axis or 0
    whole = leaf.reshape(-1) if blocks.axis is None else leaf
    missing = blocks.num_blocks * blocks.size - whole.shape[axis]
    if missing:
        whole = jnp.pad(whole, [(0, missing if i == axis else 0) for i in range(whole.ndim)])
    shape = (*whole.shape[:axis], blocks.size, blocks.num_blocks, *whole.shape[axis + 1 :])
    return jnp.moveaxis(whole.reshape(shape), axis, 0)


def from_blocks(
    values: Float[Array, "entries ..."], blocks: Blocks, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Join the blocks of a leaf."""
    axis = blocks.axis or 0
    split = jnp.moveaxis(values, 0, axis)
    entries = blocks.num_blocks * blocks.size
    whole = split.reshape(*split.shape[:axis], entries, *split.shape[axis + 2 :])
    length = math.prod(shape) if blocks.axis is None else shape[axis]
    return jax.lax.slice_in_dim(whole, 0, length, axis=axis).reshape(shape)
