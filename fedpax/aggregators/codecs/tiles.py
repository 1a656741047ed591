"""Lay words out in whole tiles of a TPU's memory, so that transfers have no padding."""

import math

import jax.numpy as jnp
from jaxtyping import Array, UInt32

LANES = 128  # words in a row of a tile


def to_tiles(
    words: UInt32[Array, "participants ..."], num_shards: int
) -> UInt32[Array, "participants shards rows 128"]:
    """Flatten the words of each shard into rows of 128.

    A TPU stores the two minor axes of an array in tiles of 8 x 128. An array with a minor axis of
    20 entries, such as the heads of a shard, takes 6.4 times its bytes in memory, and a transfer
    of the array as it is stored takes as many.

    Args:
        words: each participant's words; the minor axis is divided into shards of equal size.
        num_shards: number of shards of the minor axis. Data stays on its device if these are the
            shards of the mesh.

    Returns:
        The words, the last row of a shard padded with zeros.

    Example:
        >>> import jax
        >>> words = jax.random.bits(jax.random.key(0), (2, 9, 20, 8), "uint32")
        >>> tiles = to_tiles(words, num_shards=4)
        >>> tiles.shape  # a shard has 9 x 20 x 2 words: 2.8 rows
        (2, 4, 3, 128)
        >>> (from_tiles(tiles, words.shape) == words).all().item()
        True
    """
    sharded = words.reshape(*words.shape[:-1], num_shards, words.shape[-1] // num_shards)
    flat = jnp.moveaxis(sharded, -2, 1).reshape(words.shape[0], num_shards, -1)
    padded = jnp.pad(flat, ((0, 0), (0, 0), (0, -flat.shape[2] % LANES)))
    return padded.reshape(*flat.shape[:2], -1, LANES)


def from_tiles(
    tiles: UInt32[Array, "participants shards rows 128"], shape: tuple[int, ...]
) -> UInt32[Array, "participants ..."]:
    """Restore the words of `to_tiles`.

    Args:
        tiles: the result of `to_tiles`.
        shape: the shape of the words, participants included.

    Returns:
        The words.
    """
    num_shards, minor = tiles.shape[1], shape[-1] // tiles.shape[1]
    size = math.prod(shape[1:-1]) * minor
    flat = tiles.reshape(*tiles.shape[:2], -1)[:, :, :size]
    sharded = flat.reshape(shape[0], num_shards, *shape[1:-1], minor)
    return jnp.moveaxis(sharded, 1, -2).reshape(shape)
