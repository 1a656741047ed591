"""Lay words out for transfers: divided among devices, in whole tiles of a TPU's memory."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Shaped

LANES = 128  # words in a row of a tile


def divide_blocks(
    words: Shaped[Array, "participants words ..."], num_shards: int, num_parts: int
) -> Shaped[Array, "participants words shards parts blocks"]:
    """Divide the blocks of each shard into parts of equal size.

    Args:
        words: each participant's words, by block; the minor axis is divided into shards of equal
            size.
        num_shards: number of shards of the minor axis. Data stays on its device if these are the
            shards of the mesh.
        num_parts: number of parts of a shard.

    Returns:
        The words. The last blocks of a shard are zeros where the parts do not divide it.

    Example:
        >>> import jax.numpy as jnp
        >>> words = jnp.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4)  # 2 participants, 20 blocks
        >>> divided = divide_blocks(words, num_shards=2, num_parts=4)
        >>> divided.shape
        (2, 3, 2, 4, 3)
        >>> (join_blocks(divided[0], (5, 4)) == words[0]).all().item()
        True
    """
    participants, length, *others, minor = words.shape
    size = math.prod(others) * (minor // num_shards)  # blocks of a shard
    sharded = words.reshape(participants, length, -1, num_shards, minor // num_shards)
    flat = jnp.moveaxis(sharded, 3, 2).reshape(participants, length, num_shards, size)
    padded = jnp.pad(flat, [*[(0, 0)] * 3, (0, -size % num_parts)])
    return padded.reshape(participants, length, num_shards, num_parts, -1)


def join_blocks(
    values: Shaped[Array, "entries shards parts blocks"], shape: tuple[int, ...]
) -> Shaped[Array, "entries ..."]:
    """Restore the order of blocks that `divide_blocks` divided.

    Args:
        values: one array of blocks, such as a decoded mean.
        shape: the shape of all blocks: the axes behind the words of one participant.

    Returns:
        The blocks, `[entries, *shape]`.
    """
    entries, num_shards = values.shape[:2]
    minor = shape[-1] // num_shards
    flat = values.reshape(entries, num_shards, -1)[:, :, : math.prod(shape) // num_shards]
    sharded = flat.reshape(entries, num_shards, -1, minor)
    return jnp.moveaxis(sharded, 1, 2).reshape(entries, *shape)


def to_tiles(
    words: Shaped[Array, "participants words shards parts blocks"],
) -> Shaped[Array, "participants shards parts rows 128"]:
    """Flatten the words of each part into rows of 128.

    A TPU stores the two minor axes of an array in tiles of 8 x 128. An array with a minor axis of
    20 entries, such as the heads of a shard, takes 6.4 times its bytes in memory, and 6.4
    times its bytes in a transfer of the array as it is stored.

    Args:
        words: the result of `divide_blocks`.

    Returns:
        The words, the last row of a part padded with zeros.

    Example:
        >>> import jax
        >>> words = jax.random.bits(jax.random.key(0), (2, 9, 4, 1, 40), "uint32")
        >>> tiles = to_tiles(words)
        >>> tiles.shape  # a part has 9 x 40 words: 2.8 rows
        (2, 4, 1, 3, 128)
        >>> (from_tiles(tiles, words.shape) == words).all().item()
        True
    """
    flat = jnp.moveaxis(words, 1, 3).reshape(words.shape[0], *words.shape[2:4], -1)
    padded = jnp.pad(flat, [*[(0, 0)] * 3, (0, -flat.shape[3] % LANES)])
    return padded.reshape(*flat.shape[:3], -1, LANES)


def from_tiles(
    tiles: Shaped[Array, "participants shards parts rows 128"], shape: tuple[int, ...]
) -> Shaped[Array, "participants words shards parts blocks"]:
    """Restore the words of `to_tiles`.

    Args:
        tiles: the result of `to_tiles`.
        shape: the shape of the words, participants included.

    Returns:
        The words.
    """
    participants, length, num_shards, num_parts, blocks = shape
    flat = tiles.reshape(*tiles.shape[:3], -1)[..., : length * blocks]
    words = flat.reshape(participants, num_shards, num_parts, length, blocks)
    return jnp.moveaxis(words, 3, 1)
