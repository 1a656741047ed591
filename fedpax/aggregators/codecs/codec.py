"""The contract of a codec, and the exact codec."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from fedpax.aggregators.random_numbers import random_words
from fedpax.checks import COUNT, check_argument

BLOCK_SIZE = 1024
"""Default number of entries that share a scale: 32 bits of scale are 0.03 bits per entry."""


class Codec(NamedTuple):
    """A lossy code for blocks of floats, as a pair of pure functions.

    Blocks are vectors along the leading axis of an array `[entries, ...]`, which keeps the shape
    and the sharding of its other axes. Both functions draw from the same random key, which is not
    sent. The draws must be the same for all blocks: `decode` may get a part of the blocks, in other
    axes and another order. A block of zeros must be decoded to zeros.

    Attributes:
        encode: `(key, blocks) -> words`. `blocks` are float32 `[entries, ...]`. `words` are uint32
            `[words, ...]`: codes and scales in one buffer, which is everything that is sent.
        decode: `(key, words, entries) -> blocks`, float32 `[entries, ...]`.
        block_size: largest number of entries of a block.
        contractive: whether `E ||x - decode(encode(x))||^2 < ||x||^2` for every block x other than
            0, as error feedback needs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fedpax.aggregators import codecs
        >>> codec, key = codecs.e3m0(), jax.random.key(0)
        >>> words = codec.encode(key, jnp.array([2.0, -0.9, 0.3, 0.001]))
        >>> words.shape, words.dtype  # the scale, and one word for up to eight codes of 4 bits
        ((2,), dtype('uint32'))
        >>> codec.decode(key, words, 4).tolist()
        [2.0, -1.0, 0.25, 0.0]
    """

    encode: Callable[[Key[Array, ""], Float[Array, "entries ..."]], UInt32[Array, "words ..."]]
    decode: Callable[[Key[Array, ""], UInt32[Array, "words ..."], int], Float[Array, "entries ..."]]
    block_size: int
    contractive: bool


def float32(block_size: int = BLOCK_SIZE) -> Codec:
    """Send exact float32 values: 32 bits per value.

    Args:
        block_size: largest number of entries of a block.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> codec, key = float32(), jax.random.key(0)
        >>> codec.decode(key, codec.encode(key, jnp.array([0.5, -3.0])), 2).tolist()
        [0.5, -3.0]
    """
    return Codec(
        encode=lambda key, blocks: float_words(blocks),
        decode=lambda key, words, entries: word_floats(words),
        block_size=check_block_size("float32", block_size),
        contractive=True,
    )


def float_words(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Return the bits of float32 values as words."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def word_floats(words: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Return the float32 values whose bits are words."""
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x / y`, and 0 where y is 0."""
    return jnp.where(y == 0, 0.0, x / jnp.where(y == 0, 1.0, y))


def check_block_size(function: str, block_size: int) -> int:
    """Return a block size, an int of at least 1."""
    remedy = "Use a power of two, such as 1024."
    return check_argument(function, "block_size", block_size, COUNT, remedy=remedy)


def dither(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "entries ..."]:
    """Draw numbers in (0, 1) of 16 random bits, two from each random word."""
    # By `jax.random`, they would be most of the cost of rounding: see `random_words`. With 16 bits,
    # a probability of rounding up is exact to 2^-17.
    words = random_words(key, ((shape[0] + 1) // 2, *shape[1:]))
    halves = jnp.concatenate([words >> 16, words & 0xFFFF])[: shape[0]]
    return (halves.astype(jnp.float32) + 0.5) / 2**16


def pack_bits(codes: UInt32[Array, "entries ..."], bits: int) -> UInt32[Array, "words ..."]:
    """Pack codes into words, exactly `bits` bits each."""
    # A code is split into fields of gcd(bits, 32) bits, which fill a word. Codes that share a word
    # are far apart: operations run over contiguous rows. It is written out by place, so that a
    # compiler vectorizes it together with the codes.
    width, fields, per_word = _fields(bits)
    rows = -(-codes.shape[0] // per_word)
    padding = [(0, rows * per_word - codes.shape[0]), *[(0, 0)] * (codes.ndim - 1)]
    codes = jnp.pad(codes.astype(jnp.uint32), padding)
    parts = [codes[i * rows : (i + 1) * rows] for i in range(per_word)]
    # Whole codes share a word where they fit: one shift moves a field of all, with a quarter of the
    # operations for 5 bits.
    mask = 2**width - 1
    while (half := len(parts) // 2) >= fields:
        distance = half * width
        pairs = zip(parts[:half], parts[half:], strict=True)
        parts = [low | high << jnp.uint32(distance) for low, high in pairs]
        mask |= mask << distance
    if fields == 1:
        return parts[0]
    words = []
    for field in range(fields):
        moved = [
            _move(part, (i - field) * width) & jnp.uint32(mask << i * width)
            for i, part in enumerate(parts)
        ]
        words.append(functools.reduce(jnp.bitwise_or, moved))
    return jnp.concatenate(words)


def unpack_bits(
    words: UInt32[Array, "words ..."], bits: int, entries: int
) -> UInt32[Array, "entries ..."]:
    """Unpack the codes that `pack_bits` packed."""
    width, fields, per_word = _fields(bits)
    rows = words.shape[0] // fields
    split = words.reshape(fields, 1, rows, *words.shape[1:])
    parts = split >> _shifts(per_word, width, 1, split.ndim) & jnp.uint32(2**width - 1)
    codes = jnp.sum(parts << _shifts(fields, width, 0, split.ndim), axis=0, dtype=jnp.uint32)
    return codes.reshape(per_word * rows, *words.shape[1:])[:entries]


def packed_words(entries: int, bits: int) -> int:
    """Return the number of words that `pack_bits` packs codes into."""
    _, fields, per_word = _fields(bits)
    return fields * -(-entries // per_word)


def _move(words: UInt32[Array, "..."], bits: int) -> UInt32[Array, "..."]:
    """Shift words to the left by a number of bits, to the right by a negative one."""
    if bits == 0:
        return words
    return words << jnp.uint32(bits) if bits > 0 else words >> jnp.uint32(-bits)


def _fields(bits: int) -> tuple[int, int, int]:
    """Return the bits of a field, the fields of a code, and the fields of a word."""
    width = math.gcd(bits, 32)
    return width, bits // width, 32 // width


def _shifts(count: int, width: int, axis: int, ndim: int) -> UInt32[Array, "..."]:
    """Return the shifts 0, width, 2 width, ... along one axis."""
    shape = [1] * ndim
    shape[axis] = count
    return (width * jnp.arange(count, dtype=jnp.uint32)).reshape(shape)
