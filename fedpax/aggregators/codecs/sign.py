"""Signs and scales."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from fedpax.aggregators.codecs.codec import (
    BLOCK_SIZE,
    Codec,
    check_block_size,
    divide,
    float_words,
    pack_bits,
    unpack_bits,
    word_floats,
)
from fedpax.aggregators.codecs.rotated import rotated
from fedpax.checks import IntRange, check_argument


def sign(bits: int = 1, *, block_size: int = BLOCK_SIZE) -> Codec:
    """Send the sign of each entry, scaled by the block's mean magnitude.

    With one bit and a block x of d entries, as in EF-signSGD:

        decode_j = (||x||_1 / d) sign(x_j),   sign(0) = 1.

    With b = `bits` > 1, a code is the sign and the interval of |x_j|, of 2^(b - 1) equal ones from
    min |x| to max |x|, decoded to the mean of the magnitudes in it. The code is biased, and

        ||decode - x||^2 <= (1 - ||x||_1^2 / (d ||x||^2)) ||x||^2.

    On the wire a block has `bits` bits per entry and 2^(bits - 1) floats.

    Args:
        bits: bits of a code, 1 to 4.
        block_size: largest number of entries of a block. Default 1024.

    Returns:
        The codec. Use it with error feedback.

    Raises:
        TypeError: `bits` or `block_size` is not an int.
        ValueError: `bits` or `block_size` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, key = jnp.array([1.0, -7.0, 1.5, 6.5]), jax.random.key(0)
        >>> for codec in sign(), sign(bits=2):
        ...     print(codec.decode(key, codec.encode(key, x), 4).tolist())
        [4.0, -4.0, 4.0, 4.0]
        [1.25, -6.75, 1.25, 6.75]

    Reference:
        Karimireddy et al., arXiv:1901.09847, algorithm 1. Sarfi et al., arXiv:2508.15706 (2-bit
        values; the means of intervals are chosen here).
    """
    remedy = "Use codecs.uniform(bits) for more."
    bits = check_argument("sign", "bits", bits, IntRange(least=1, most=4), remedy=remedy)
    bins = 2 ** (bits - 1)

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        magnitude = jnp.abs(blocks)
        interval = _interval(magnitude, bins)
        # A NaN belongs to every interval, so that it reaches the server.
        in_bin = [(interval == i) | jnp.isnan(interval) for i in range(bins)]
        totals = [jnp.sum(jnp.where(o, magnitude, 0), axis=0) for o in in_bin]
        counts = [jnp.sum(o, axis=0) for o in in_bin]
        scales = divide(jnp.stack(totals), jnp.stack(counts))
        codes = (blocks < 0).astype(jnp.uint32) + 2 * interval.astype(jnp.uint32)
        return jnp.concatenate([float_words(scales), pack_bits(codes, bits)])

    def decode(
        key: Key[Array, ""], words: UInt32[Array, "words ..."], entries: int
    ) -> Float[Array, "entries ..."]:
        scales = word_floats(words[:bins])
        codes = unpack_bits(words[bins:], bits, entries)
        magnitude = scales[:1]
        for i in range(1, bins):
            magnitude = jnp.where(codes >> 1 == i, scales[i], magnitude)
        return jnp.where(codes & 1 == 1, -magnitude, magnitude)

    return Codec(encode, decode, check_block_size("sign", block_size), contractive=True)


def _interval(magnitude: Float[Array, "entries ..."], bins: int) -> Float[Array, "entries ..."]:
    """Return the index of each entry's interval, of equal intervals of the block's range."""
    if bins == 1:
        return jnp.zeros_like(magnitude)
    low = jnp.min(magnitude, axis=0, keepdims=True)
    width = (jnp.max(magnitude, axis=0, keepdims=True) - low) / bins
    return jnp.clip(jnp.floor(divide(magnitude - low, width)), 0, bins - 1)


def drive(*, unbiased: bool = True, block_size: int = BLOCK_SIZE) -> Codec:
    """Send the signs of the rotated block and one scale: one bit per entry.

    With a block x of d entries and a random rotation R:

        decode = S R^T sign(R x),   S = ||x||^2 / ||R x||_1   (unbiased)
                                 or S = ||R x||_1 / d         (least squared error).

    For a uniformly random rotation, the unbiased scale has the mean squared error (pi/2 - 1)
    ||x||^2, which a mean of n participants divides by n, and the other one (1 - 2/pi) ||x||^2. The
    randomized Hadamard transform comes close unless a few entries dominate a block.

    Args:
        unbiased: which scale to send. Default True: the unbiased one, for many participants. With
            error feedback, use False.
        block_size: largest number of entries of a block. Default 1024.

    Returns:
        The codec. It is contractive if `unbiased` is False.

    Raises:
        TypeError: `block_size` is not an int.
        ValueError: `block_size` is below 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (1024, 50))
        >>> for codec in drive(), drive(unbiased=False):  # pi/2 - 1 = 0.57, 1 - 2/pi = 0.36
        ...     error = codec.decode(key, codec.encode(key, x), 1024) - x
        ...     print(round(jnp.sum(error**2).item() / jnp.sum(x**2).item(), 2))
        0.57
        0.36

    Reference:
        Vargaftik et al., DRIVE, arXiv:2105.08339, algorithm 1, theorems 1 to 3, section 6
        (Hadamard).
    """
    signs = sign(block_size=check_block_size("drive", block_size))
    if not unbiased:
        return rotated(signs)

    def encode(
        key: Key[Array, ""], blocks: Float[Array, "entries ..."]
    ) -> UInt32[Array, "words ..."]:
        squares = jnp.sum(blocks**2, axis=0, keepdims=True)
        scale = divide(squares, jnp.sum(jnp.abs(blocks), axis=0, keepdims=True))
        return jnp.concatenate([float_words(scale), pack_bits(blocks < 0, 1)])

    return rotated(signs._replace(encode=encode, contractive=False))
