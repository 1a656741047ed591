"""Entries at random places. The places are not sent."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from fedpax.aggregators.codecs.codec import Codec, check_block_size, float32
from fedpax.aggregators.codecs.rotated import check_codec
from fedpax.aggregators.random_streams import random_words
from fedpax.checks import PROBABILITY, check_argument

SPARSE_BLOCK_SIZE = 4096
"""Default block size of the sparse codecs: an index has 12 bits."""


def random_k(
    fraction: float,
    *,
    unbiased: bool = True,
    values: Codec | None = None,
    block_size: int = SPARSE_BLOCK_SIZE,
) -> Codec:
    """Send a random subset of the entries of each block; the others are decoded to 0.

    Of d entries, k = ceil(fraction d) are sent. Their places come from the shared key and are not
    sent. The places differ between participants and rounds. All blocks of a parameter have the same
    places.

    Args:
        fraction: fraction of the entries that is sent, above 0 and at most 1.
        unbiased: whether the entries are scaled by d / k. Default True: the code is unbiased, with
            E ||decode - x||^2 = (d / k - 1) ||x||^2. False: no scale, for error feedback, with
            E ||decode - x||^2 = (1 - k / d) ||x||^2.
        values: codec of the k values of a block. Default None: `float32()`, exact.
        block_size: largest number of entries of a block. Default 4096.

    Returns:
        The codec. It is contractive if `unbiased` is False and `values` is contractive.

    Raises:
        TypeError: `fraction` is not a number, `values` not a codec, or `block_size` not an int.
        ValueError: `fraction` or `block_size` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> codec, key = random_k(0.5), jax.random.key(0)
        >>> sent = codec.decode(key, codec.encode(key, jnp.array([1.0, -7.0, 0.5, 2.0])), 4)
        >>> sum(entry in (0, doubled) for entry, doubled in zip(sent.tolist(), [2, -14, 1, 4]))
        4
        >>> int(jnp.sum(sent != 0))
        2

    Reference:
        Konečný et al., Federated Learning: Strategies for Improving Communication Efficiency,
        arXiv:1610.05492, section 3 (random mask, sent as a seed).
        Stich et al., Sparsified SGD with Memory, arXiv:1809.07599, section 2.
    """
    fraction = check_fraction("random_k", fraction)
    value_codec = float32() if values is None else values
    check_codec("random_k", "values", value_codec)

    def places(key: Key[Array, ""], entries: int) -> tuple[Int[Array, " k"], Key[Array, ""]]:
        places_key, values_key = jax.random.split(key)
        # 24 bits, which are exact in float32: a CPU selects the largest floats without sorting.
        draws = (random_words(places_key, (entries,)) >> 8).astype(jnp.float32)
        return jax.lax.top_k(draws, count(fraction, entries))[1], values_key

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        indices, values_key = places(key, blocks.shape[0])
        scale = blocks.shape[0] / len(indices) if unbiased else 1.0
        return value_codec.encode(values_key, scale * jnp.take(blocks, indices, axis=0))

    def decode(
        key: Key[Array, ""], words: UInt32[Array, "words ..."], entries: int
    ) -> Float[Array, "entries ..."]:
        indices, values_key = places(key, entries)
        sent = value_codec.decode(values_key, words, len(indices))
        zeros = jnp.zeros((entries, *words.shape[1:]), jnp.float32)
        return zeros.at[indices].set(sent, unique_indices=True)

    contractive = value_codec.contractive and not unbiased
    return Codec(encode, decode, check_block_size("random_k", block_size), contractive)


def count(fraction: float, entries: int) -> int:
    """Return the number of entries that a fraction of a block is, rounded up."""
    return min(entries, math.ceil(fraction * entries))


def check_fraction(function: str, fraction: float) -> float:
    """Return a fraction, a number above 0 and at most 1."""
    remedy = "Use 0.01 to send one entry in a hundred."
    return check_argument(function, "fraction", fraction, PROBABILITY, remedy=remedy)
