"""Stochastic uniform quantization to k bits."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from fedpax.aggregators.codecs.bit_packing import pack_bits, unpack_bits
from fedpax.aggregators.codecs.codec import (
    BLOCK_SIZE,
    Codec,
    check_block_size,
    dither,
    divide,
    float_words,
    word_floats,
)
from fedpax.checks import IntRange, check_argument


def uniform(bits: int, *, block_size: int = BLOCK_SIZE) -> Codec:
    """Round each entry at random to one of 2^bits levels between its block's minimum and maximum.

    With L = 2^bits levels and a block x of d entries:

        s = (max x - min x) / (L - 1);   k_j = floor((x_j - min x) / s + u_j),  u_j ~ U[0, 1);
        decode(k)_j = min x + s k_j.

    It is unbiased, and its error is bounded: E ||decode - x||^2 <= d s^2 / 4 <=
    d ||x||^2 / (2 (L - 1)^2). On the wire a block has `bits` bits per entry and two floats, its
    minimum and s.

    Args:
        bits: bits of a code, 1 to 16.
        block_size: largest number of entries of a block. Default 1024. Smaller blocks have a
            smaller error and more scales.

    Returns:
        The codec. It is contractive, so that it can be used with error feedback, if
        `block_size < 2 (L - 1)^2`: from 5 bits with the default.

    Raises:
        TypeError: `bits` or `block_size` is not an int.
        ValueError: `bits` or `block_size` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> codec, x = uniform(bits=2), jnp.array([0.0, 1.0, 2.2, 3.0])
        >>> draws = [codec.decode(key, codec.encode(key, x), 4)
        ...     for key in jax.random.split(jax.random.key(0), 100)]
        >>> sorted({draw[2].item() for draw in draws})  # each draw is a level
        [2.0, 3.0]
        >>> abs(sum(draws)[2].item() / 100 - 2.2) < 0.1  # right on average
        True

    Reference:
        Suresh et al., Distributed Mean Estimation with Limited Communication, arXiv:1611.00429,
        section 2.2 (stochastic k-level quantization).
    """
    is_too_large = isinstance(bits, int) and bits > 16
    remedy = "Use 16, the largest." if is_too_large else "Use 4, for example."
    bits = check_argument("uniform", "bits", bits, IntRange(least=1, most=16), remedy=remedy)
    block_size = check_block_size("uniform", block_size)
    levels = 2**bits

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        low = jnp.min(blocks, axis=0, keepdims=True)
        step = (jnp.max(blocks, axis=0, keepdims=True) - low) / (levels - 1)
        place = divide(blocks - low, step) + dither(key, blocks.shape)
        codes = jnp.clip(jnp.floor(place), 0, levels - 1).astype(jnp.uint32)
        return jnp.concatenate([float_words(low), float_words(step), pack_bits(codes, bits)])

    def decode(
        key: Key[Array, ""], words: UInt32[Array, "words ..."], entries: int
    ) -> Float[Array, "entries ..."]:
        low, step = word_floats(words[:1]), word_floats(words[1:2])
        return low + step * unpack_bits(words[2:], bits, entries).astype(jnp.float32)

    contractive = block_size < 2 * (levels - 1) ** 2
    return Codec(encode, decode, block_size, contractive)
