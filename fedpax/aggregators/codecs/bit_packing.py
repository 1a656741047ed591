"""Pack codes of a few bits into 32-bit words."""

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, UInt32


def pack_bits(codes: UInt32[Array, "entries ..."], bits: int) -> UInt32[Array, "words ..."]:
    """Pack codes into words, exactly `bits` bits each."""
    # A code is split into fields of gcd(bits, 32) bits, so that a whole number of fields fills a
    # word. Codes that share a word are far apart: every operation runs over contiguous rows. It is
    # written out by place, not as a sum over an axis of places, so that a compiler vectorizes it
    # together with the computation of the codes.
    width, fields, per_word = _fields(bits)
    rows = -(-codes.shape[0] // per_word)
    padding = [(0, rows * per_word - codes.shape[0]), *[(0, 0)] * (codes.ndim - 1)]
    codes = jnp.pad(codes.astype(jnp.uint32), padding)
    places = [codes[i * rows : (i + 1) * rows] for i in range(per_word)]
    words = []
    for field in range(fields):
        parts = places
        if fields > 1:
            mask = jnp.uint32(2**width - 1)
            parts = [code >> jnp.uint32(field * width) & mask for code in places]
        shifted = [part << jnp.uint32(i * width) for i, part in enumerate(parts)]
        words.append(functools.reduce(jnp.bitwise_or, shifted))
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


def _fields(bits: int) -> tuple[int, int, int]:
    """Return the bits of a field, the fields of a code, and the fields of a word."""
    width = math.gcd(bits, 32)
    return width, bits // width, 32 // width


def _shifts(count: int, width: int, axis: int, ndim: int) -> UInt32[Array, "..."]:
    """Return the shifts 0, width, 2 width, ... along one axis."""
    shape = [1] * ndim
    shape[axis] = count
    return (width * jnp.arange(count, dtype=jnp.uint32)).reshape(shape)
