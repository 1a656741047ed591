"""Random numbers for stochastic rounding."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32


def dither(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "entries ..."]:
    """Draw numbers in (0, 1) of 16 random bits, two from each random word.

    The words are a hash of their indices and the key. Unlike those of `jax.random`, they need no
    loop over arrays, so the compiler fuses them into the rounding: drawn by `jax.random`, they are
    most of the cost of stochastic rounding. With 16 bits, a probability of rounding up is exact to
    2^-17.

    Args:
        key: a random key.
        shape: shape of the result; its first axis is not empty.

    Returns:
        float32 numbers (i + 1/2) / 2^16, the same on any mesh.

    Example:
        >>> u = dither(jax.random.key(0), (1001, 3))
        >>> u.shape, bool((u > 0).all() & (u < 1).all()), round(u.mean().item(), 2)
        ((1001, 3), True, 0.5)
    """
    half = (shape[0] + 1) // 2, *shape[1:]
    indices = jnp.zeros(half, jnp.uint32)
    for axis in range(len(half)):
        stride = jnp.uint32(math.prod(half[axis + 1 :]) % 2**32)
        indices += stride * jax.lax.broadcasted_iota(jnp.uint32, half, axis)
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    words = _hash(_hash(indices + first) ^ second)
    halves = jnp.concatenate([words >> 16, words & 0xFFFF])[: shape[0]]
    return (halves.astype(jnp.float32) + 0.5) / 2**16


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permute the integers of 32 bits: shifts and odd factors, so that all bits mix."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 15)
