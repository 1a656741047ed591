"""Random words by a hash of their indices, for masks, stochastic rounding and noise."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Key, UInt32


def random_words(
    key: Key[Array, ""], shape: tuple[int, ...], sharding: P | None = None
) -> UInt32[Array, "..."]:
    """Draw random words: a hash of their indices and the key, the same on any mesh."""
    # Unlike words of `jax.random`, they need no loop over arrays: the compiler fuses them into what
    # reads them. They pass for random in a simulation, and hide nothing from an adversary. With one
    # key, no word repeats within 2^32 indices.
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    return rehash(hashed_indices(first, shape, sharding), second)


def hashed_indices(
    seed: UInt32[Array, ""], shape: tuple[int, ...], sharding: P | None = None
) -> UInt32[Array, "..."]:
    """Hash the indices of an array once: half of `random_words`."""
    # Several calls of `rehash` can share it, each with another seed.
    indices = jnp.zeros((), jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        places = jax.lax.broadcasted_iota(jnp.uint32, shape, axis, out_sharding=sharding)
        indices += stride * places
    return _hash(indices + seed)


def rehash(hashed: UInt32[Array, "..."], seed: UInt32[Array, ""]) -> UInt32[Array, "..."]:
    """Draw random words from `hashed_indices` with a second seed: one hash for each word."""
    return _hash(hashed ^ seed)


def random_normal(
    key: Key[Array, ""],
    shape: tuple[int, ...],
    *,
    stddev: float = 1.0,
    sharding: P | None = None,
) -> Float[Array, "..."]:
    """Draw normal numbers, each from a word of `random_words`, the same on any mesh."""
    return normal_from_words(random_words(key, shape, sharding), stddev)


def normal_from_words(words: UInt32[Array, "..."], stddev: float) -> Float[Array, "..."]:
    """Map uniform random words to normal numbers: the quantiles of their upper 24 bits."""
    odd = 2 * (words >> 8).astype(jnp.int32) + (1 - 2**24)  # float32 numbers hold it
    # One factor: XLA would group two in an order that depends on the program.
    return math.sqrt(2) * stddev * jax.lax.erf_inv(odd.astype(jnp.float32) * 2.0**-24)


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permute the integers of 32 bits: shifts and odd factors, so that all bits mix."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 15)
