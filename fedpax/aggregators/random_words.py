"""Random words by a hash of their indices, for masks and for stochastic rounding."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key, UInt32


def random_words(
    key: Key[Array, ""], shape: tuple[int, ...], sharding: P | None = None
) -> UInt32[Array, "..."]:
    """Draw random words: a hash of their indices and the key, the same on any mesh.

    Unlike those of `jax.random`, they need no loop over arrays: the compiler fuses them into what
    reads them. They pass for random in a simulation, and hide nothing from an adversary.

    Args:
        key: a random key.
        shape: shape of the result.
        sharding: partition spec of the result over explicit mesh axes. Default None: not sharded.

    Returns:
        uint32 words, uniform over all 2^32 values.

    Example:
        >>> words = random_words(jax.random.key(0), (1001, 3))
        >>> words.shape, words.dtype, round(words.astype(float).mean().item() / 2**32, 2)
        ((1001, 3), dtype('uint32'), 0.5)
    """
    indices = jnp.zeros((), jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        places = jax.lax.broadcasted_iota(jnp.uint32, shape, axis, out_sharding=sharding)
        indices += stride * places
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    return _hash(_hash(indices + first) ^ second)


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permute the integers of 32 bits: shifts and odd factors, so that all bits mix."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 15)
