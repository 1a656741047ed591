"""E3M0: a 4-bit float of a sign and three bits of exponent."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from fedpax.aggregators.codecs.bit_packing import pack_bits, unpack_bits
from fedpax.aggregators.codecs.codec import (
    BLOCK_SIZE,
    Codec,
    check_block_size,
    divide,
    float_words,
    word_floats,
)


def e3m0(*, block_size: int = BLOCK_SIZE) -> Codec:
    """Round each entry to a 4-bit float: a sign, three bits of exponent, no mantissa.

    With the block's largest magnitude s, an entry is rounded to the nearest of

        0, +-s/64, +-s/32, +-s/16, +-s/8, +-s/4, +-s/2, +-s.

    The smallest exponent stands for 0, as in IEEE formats. It is biased and deterministic. On the
    wire a block has 4 bits per entry and one float, s. The paper does not state its scale; here
    it is the maximum of a block.

    Args:
        block_size: largest number of entries of a block. Default 1024.

    Returns:
        The codec. It is contractive; the paper uses it without error feedback.

    Raises:
        TypeError: `block_size` is not an int.
        ValueError: `block_size` is below 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> codec, key = e3m0(), jax.random.key(0)
        >>> codec.decode(key, codec.encode(key, jnp.array([-0.7, 8.0, 3.1, 0.1, 0.05])), 5).tolist()
        [-0.5, 8.0, 4.0, 0.125, 0.0]

    Reference:
        Douillard et al., Streaming DiLoCo with overlapping communication, arXiv:2501.18512,
        section 2.4 (quantized communication).
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
