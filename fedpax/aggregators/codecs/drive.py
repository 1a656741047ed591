"""DRIVE: the signs of the rotated update, and one scale."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from fedpax.aggregators.codecs.bit_packing import pack_bits
from fedpax.aggregators.codecs.codec import (
    BLOCK_SIZE,
    Codec,
    check_block_size,
    divide,
    float_words,
)
from fedpax.aggregators.codecs.rotated import rotated
from fedpax.aggregators.codecs.sign import sign


def drive(*, unbiased: bool = True, block_size: int = BLOCK_SIZE) -> Codec:
    """Send the signs of the rotated block and one scale: one bit per entry.

    With a block x of d entries and a random rotation R:

        decode = S R^T sign(R x),   S = ||x||^2 / ||R x||_1   (unbiased)
                                 or S = ||R x||_1 / d         (least squared error).

    On average, the unbiased scale has the squared error (pi/2 - 1) ||x||^2, and a mean of n
    participants divides it by n. The other scale has (1 - 2/pi) ||x||^2, the smallest error of a
    single participant. These figures, and the lack of bias, hold for a uniformly random rotation.
    The randomized Hadamard transform, used here and in the paper's experiments, comes close for
    blocks that are not dominated by a few entries. A block of two entries is biased.

    Args:
        unbiased: which scale to send. Default True: the unbiased one, for many participants. With
            error feedback, use False.
        block_size: largest number of entries of a block. Default 1024. The paper uses one block.

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
        Vargaftik et al., DRIVE: One-bit Distributed Mean Estimation, arXiv:2105.08339,
        algorithm 1, theorems 1 to 3, section 6 (Hadamard).
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
