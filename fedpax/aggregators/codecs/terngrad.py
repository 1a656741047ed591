"""TernGrad: stochastic quantization to three levels."""

import functools

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
from fedpax.checks import POSITIVE, check_argument

PER_BYTE = 5  # 3^5 = 243 codes fit one byte


def terngrad(*, clip: float | None = None, block_size: int = BLOCK_SIZE) -> Codec:
    """Send each entry as -s, 0 or s, where s is the block's largest magnitude.

    With a block x:

        s = max |x|;   t_j = sign(x_j) b_j,  b_j ~ Bernoulli(|x_j| / s);   decode(t)_j = s t_j.

    Without `clip` it is unbiased, with the variance sum_j |x_j| (s - |x_j|). Five codes share a
    byte: 1.6 bits per entry, and one float per block.

    Args:
        clip: entries are clipped to this many standard deviations of their block first. It lowers
            the variance and adds a bias. Default None: no clipping. The paper uses 2.5.
        block_size: largest number of entries of a block. Default 1024. The paper uses one block per
            layer.

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
        Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
        Learning, arXiv:1705.07878, equations 1 to 3; equation 10 (clipping).
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
