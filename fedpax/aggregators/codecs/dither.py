"""Random numbers for stochastic rounding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fedpax.aggregators.random_words import random_words


def dither(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "entries ..."]:
    """Draw numbers in (0, 1) of 16 random bits, two from each random word."""
    # Drawn by `jax.random`, they would be most of the cost of stochastic rounding: see
    # `random_words`. With 16 bits, a probability of rounding up is exact to 2^-17.
    words = random_words(key, ((shape[0] + 1) // 2, *shape[1:]))
    halves = jnp.concatenate([words >> 16, words & 0xFFFF])[: shape[0]]
    return (halves.astype(jnp.float32) + 0.5) / 2**16
