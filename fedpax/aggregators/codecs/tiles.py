"""Lay words out for transfers: divided among devices, in whole tiles of a TPU's memory."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Shaped

LANES = 128  # words in a row of a tile


def divide_blocks(
    words: Shaped[Array, "participants words ..."], num_shards: int, num_parts: int
) -> Shaped[Array, "participants words shards parts blocks"]:
    """Divide the blocks of each shard into parts of equal size."""
    participants, length, *inner, minor = words.shape
    size = math.prod(inner) * (minor // num_shards)  # blocks of a shard
    sharded = words.reshape(participants, length, -1, num_shards, minor // num_shards)
    flat = jnp.moveaxis(sharded, 3, 2).reshape(participants, length, num_shards, size)
    padded = jnp.pad(flat, [*[(0, 0)] * 3, (0, -size % num_parts)])
    return padded.reshape(participants, length, num_shards, num_parts, -1)


def join_blocks(
    values: Shaped[Array, "entries shards parts blocks"], shape: tuple[int, ...]
) -> Shaped[Array, "entries ..."]:
    """Restore the order of blocks that `divide_blocks` divided."""
    entries, num_shards = values.shape[:2]
    minor = shape[-1] // num_shards
    flat = values.reshape(entries, num_shards, -1)[:, :, : math.prod(shape) // num_shards]
    sharded = flat.reshape(entries, num_shards, -1, minor)
    return jnp.moveaxis(sharded, 1, 2).reshape(entries, *shape)


def to_tiles(
    words: Shaped[Array, "participants words shards parts blocks"],
) -> Shaped[Array, "participants shards parts rows 128"]:
    """Flatten the words of each part into rows of 128."""
    # A TPU stores the two minor axes of an array in tiles of 8 x 128. An array with a minor axis of
    # 20 entries, such as the heads of a shard, takes 6.4 times its bytes in memory, and 6.4 times
    # its bytes in a transfer of the array as it is stored.
    flat = jnp.moveaxis(words, 1, 3).reshape(words.shape[0], *words.shape[2:4], -1)
    padded = jnp.pad(flat, [*[(0, 0)] * 3, (0, -flat.shape[3] % LANES)])
    return padded.reshape(*flat.shape[:3], -1, LANES)


def from_tiles(
    tiles: Shaped[Array, "participants shards parts rows 128"], shape: tuple[int, ...]
) -> Shaped[Array, "participants words shards parts blocks"]:
    """Restore the words of `to_tiles`."""
    participants, length, num_shards, num_parts, blocks = shape
    flat = tiles.reshape(*tiles.shape[:3], -1)[..., : length * blocks]
    words = flat.reshape(participants, num_shards, num_parts, length, blocks)
    return jnp.moveaxis(words, 3, 1)
