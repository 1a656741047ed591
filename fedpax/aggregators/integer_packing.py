"""Pack the integer codes of a leaf into 32-bit words whose sums are the sums of the codes."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from fedpax.errors import ArgumentError

WORD = 2**32


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of a leaf's codes in words: adjacent entries of one axis are digits of a word."""

    base: int  # base of the digits, one more than the largest possible sum of codes
    axis: int | None  # the axis of the leaf that is packed; None for a scalar
    entries_per_word: int  # number of adjacent entries that share a word


def choose_packing(
    shape: tuple[int, ...],
    participants: int,
    num_levels: int,
    shards: tuple[int, ...] | None = None,
) -> Packing:
    """Choose the packing with the fewest words."""
    # Among equal packings, the number of words with more factors of 2 is preferred, because the
    # words can then stay sharded. A word never spans two shards. The shards are known for explicit
    # mesh axes only.
    base = participants * (num_levels - 1) + 1
    most = next((d for d in range(32, 0, -1) if base**d <= WORD), 0)
    if not most:
        raise ArgumentError(
            f"num_levels is {num_levels}, but the sum of {participants:,} participants' codes of "
            "that many levels does not fit a 32-bit word. Use fewer levels."
        )
    if not shape or 0 in shape:
        return Packing(base, None, 1)

    def cost(axis_and_entries: tuple[int, int]) -> tuple[float, int]:
        axis, entries_per_word = axis_and_entries
        words = -(-shape[axis] // entries_per_word)
        # Words that divide the axis keep its sharding, which is worth up to half the density.
        padded = 2 if words * entries_per_word != shape[axis] else 1
        return padded * words / shape[axis], -(words & -words)

    def whole_words(axis_and_entries: tuple[int, int]) -> bool:
        axis, entries_per_word = axis_and_entries
        over = 1 if shards is None else shards[axis]
        return over == 1 or entries_per_word == 1 or shape[axis] % (over * entries_per_word) == 0

    choices = itertools.product(range(len(shape)), range(1, most + 1))
    axis, entries_per_word = min(filter(whole_words, choices), key=cost)
    return Packing(base, axis, entries_per_word)


def shards_per_axis(leaf: jax.Array) -> tuple[int, ...]:
    """Return the number of devices that each axis of a leaf is sharded over, by its type."""
    sharding = jax.typeof(leaf).sharding
    names = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    return tuple(math.prod(sharding.mesh.shape[name] for name in axes) for axes in names)


def pack(codes: jax.Array, packing: Packing) -> jax.Array:
    """Pack the codes of one participant into uint32 words."""
    codes = codes.astype(jnp.uint32)
    axis, entries_per_word = packing.axis, packing.entries_per_word
    if axis is None or entries_per_word == 1:
        return codes
    words = -(-codes.shape[axis] // entries_per_word)
    padding = [
        (0, words * entries_per_word - size if i == axis else 0)
        for i, size in enumerate(codes.shape)
    ]
    if any(after for _, after in padding):
        codes = jnp.pad(codes, padding)
    split = codes.reshape(*codes.shape[:axis], words, entries_per_word, *codes.shape[axis + 1 :])
    return jnp.sum(split * _powers(packing, split.ndim), axis + 1, jnp.uint32)


def unpack(words: jax.Array, packing: Packing, shape: tuple[int, ...]) -> jax.Array:
    """Unpack sums of words into sums of codes, an array of `shape`."""
    axis, entries_per_word = packing.axis, packing.entries_per_word
    if axis is None or entries_per_word == 1:
        return words
    split = jnp.expand_dims(words, axis + 1)
    split = split // _powers(packing, split.ndim) % jnp.uint32(packing.base)
    whole = split.reshape(
        *words.shape[:axis], words.shape[axis] * entries_per_word, *words.shape[axis + 1 :]
    )
    return jax.lax.slice_in_dim(whole, 0, shape[axis], axis=axis)


def _powers(packing: Packing, ndim: int) -> jax.Array:
    """Return the powers of the base of a word's digits, along the axis after the words."""
    powers = jnp.array([packing.base**i for i in range(packing.entries_per_word)], jnp.uint32)
    return powers.reshape(-1, *[1] * (ndim - 2 - (packing.axis or 0)))
