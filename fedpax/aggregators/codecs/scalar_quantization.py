"""Stochastic quantization of entries."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from fedpax.aggregators.codecs.codec import (
    BLOCK_SIZE,
    Codec,
    check_block_size,
    dither,
    divide,
    float_words,
    pack_bits,
    unpack_bits,
    word_floats,
)
from fedpax.checks import POSITIVE, IntRange, check_argument


def uniform(bits: int, *, block_size: int = BLOCK_SIZE) -> Codec:
    """Round each entry at random to one of 2^bits levels between its block's minimum and maximum.

    With L = 2^bits levels and a block x of d entries:

        s = (max x - min x) / (L - 1);   k_j = floor((x_j - min x) / s + u_j),  u_j ~ U[0, 1);
        decode(k)_j = min x + s k_j.

    It is unbiased: E ||decode - x||^2 <= d s^2 / 4 <= d ||x||^2 / (2 (L - 1)^2). On the wire a
    block has `bits` bits per entry and two floats, its minimum and s.

    Args:
        bits: bits of a code, 1 to 16.
        block_size: largest number of entries of a block. Default 1024.

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
        Suresh et al., arXiv:1611.00429, section 2.2 (stochastic k-level quantization).
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


PER_BYTE = 5  # 3^5 = 243 codes fit one byte


def terngrad(*, clip: float | None = None, block_size: int = BLOCK_SIZE) -> Codec:
    """Send each entry as -s, 0 or s, where s is the block's largest magnitude.

    With a block x:

        s = max |x|;   t_j = sign(x_j) b_j,  b_j ~ Bernoulli(|x_j| / s);   decode(t)_j = s t_j.

    Without `clip` it is unbiased, with the variance sum_j |x_j| (s - |x_j|). On the wire a block
    has 1.6 bits per entry and one float.

    Args:
        clip: entries are clipped to this many standard deviations of their block first. Default
            None: no clipping. The paper uses 2.5.
        block_size: largest number of entries of a block. Default 1024.

    Returns:
        The codec. It is not contractive, so it cannot be used with error feedback.

    Raises:
        TypeError: `block_size` is not an int, or `clip` is not a number.
        ValueError: `block_size` is below 1; `clip` is not positive and finite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> codec, key = terngrad(), jax.random.key(1)
        >>> x = jnp.array([-2.0, 0.0, 2.0, 0.5])
        >>> codec.decode(key, codec.encode(key, x), 4).tolist()[:3]
        [-2.0, 0.0, 2.0]

    Reference:
        Wen et al., TernGrad, arXiv:1705.07878, equations 1 to 3; equation 10 (clipping).
    """
    if clip is not None:
        remedy = "Use 2.5 standard deviations, as the paper, or None for no clipping."
        clip = check_argument("terngrad", "clip", clip, POSITIVE, remedy=remedy)

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        magnitude = jnp.abs(blocks)
        if clip is not None:
            magnitude = jnp.minimum(magnitude, clip * jnp.std(blocks, axis=0, keepdims=True))
        scale = jnp.max(magnitude, axis=0, keepdims=True)
        keep = dither(key, blocks.shape) < divide(magnitude, scale)
        trits = jnp.where(keep, jnp.where(blocks < 0, 2, 1), 0).astype(jnp.uint32)
        rows = -(-trits.shape[0] // PER_BYTE)
        padding = [(0, rows * PER_BYTE - trits.shape[0]), *[(0, 0)] * (trits.ndim - 1)]
        trits = jnp.pad(trits, padding)
        parts = [trits[i * rows : (i + 1) * rows] * jnp.uint32(3**i) for i in range(PER_BYTE)]
        codes = functools.reduce(jnp.add, parts)
        return jnp.concatenate([float_words(scale), pack_bits(codes, 8)])

    def decode(
        key: Key[Array, ""], words: UInt32[Array, "words ..."], entries: int
    ) -> Float[Array, "entries ..."]:
        rows = -(-entries // PER_BYTE)
        codes = unpack_bits(words[1:], 8, rows)
        digits = [codes // jnp.uint32(3**i) % jnp.uint32(3) for i in range(PER_BYTE)]
        trits = jnp.concatenate(digits)[:entries]
        signs = jnp.where(trits == 2, -1.0, trits.astype(jnp.float32))
        return word_floats(words[:1]) * signs

    return Codec(encode, decode, check_block_size("terngrad", block_size), contractive=False)


def e3m0(*, block_size: int = BLOCK_SIZE) -> Codec:
    """Round each entry to a 4-bit float: a sign, three bits of exponent, no mantissa.

    With the block's largest magnitude s, an entry is rounded to the nearest of

        0, +-s/64, +-s/32, +-s/16, +-s/8, +-s/4, +-s/2, +-s.

    It is biased and deterministic. On the wire a block has 4 bits per entry and one float, s.

    Args:
        block_size: largest number of entries of a block. Default 1024.

    Returns:
        The codec. It is contractive.

    Raises:
        TypeError: `block_size` is not an int.
        ValueError: `block_size` is below 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> codec, key = e3m0(), jax.random.key(0)
        >>> codec.decode(key, codec.encode(key, jnp.array([-0.7, 8.0, 3.1, 0.1, 0.05])), 5).tolist()
        [-0.5, 8.0, 4.0, 0.125, 0.0]

    Reference:
        Douillard et al., Streaming DiLoCo, arXiv:2501.18512, section 2.4 (quantized communication).
    """
    # The smallest |x| / s that each code from 1 to 7 stands for: halfway to the code below.
    thresholds = [2.0**-7, *(1.5 * 2.0**e for e in range(-6, 0))]

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        magnitude = jnp.abs(blocks)
        scale = jnp.max(magnitude, axis=0, keepdims=True)
        relative = divide(magnitude, scale)
        exponent = sum((relative >= t).astype(jnp.uint32) for t in thresholds)
        codes = exponent + 8 * (blocks < 0).astype(jnp.uint32)
        return jnp.concatenate([float_words(scale), pack_bits(codes, 4)])

    def decode(
        key: Key[Array, ""], words: UInt32[Array, "words ..."], entries: int
    ) -> Float[Array, "entries ..."]:
        codes = unpack_bits(words[1:], 4, entries)
        power = (1 << (codes & 7) >> 1).astype(jnp.float32) / 64  # 0, 1/64, 1/32, ..., 1
        return word_floats(words[:1]) * jnp.where(codes >= 8, -power, power)

    return Codec(encode, decode, check_block_size("e3m0", block_size), contractive=True)
