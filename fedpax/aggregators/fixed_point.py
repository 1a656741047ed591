"""Floats as integers whose sums are exact: the numbers of secure aggregation."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from fedpax.aggregators.presence import mean_dtype


class FixedPoint(NamedTuple):
    """Multiples of `step = max_value / largest`, with `largest = 2^(bits - 1) - 1`.

    `encode` and `decode` are the arithmetic of `secure_mean`, and of sums between sites.

    Attributes:
        max_value: entries are clipped to [-max_value, max_value].
        bits: bits per entry, 2 to 24.

    Example:
        >>> code = FixedPoint(max_value=1.0, bits=16)
        >>> total = code.encode(jnp.array([0.5, 2.0])) + code.encode(jnp.array([0.25, -0.5]))
        >>> code.decode(total, jnp.int32(2), like=jnp.zeros(2)).round(4).tolist()
        [0.375, 0.25]
    """

    max_value: float
    bits: int

    @property
    def largest(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def step(self) -> float:
        """The difference of values with successive codes."""
        return self.max_value / self.largest

    def encode(self, u: Num[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Return the int32 codes of an array; NaN has the code 0."""
        u = jnp.nan_to_num(u.astype(jnp.float32), nan=0.0)
        clipped = jnp.clip(u, -self.max_value, self.max_value)
        return jnp.round(clipped / self.step).astype(jnp.int32)

    def clipped(self, u: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """Return which entries are not encoded with an error of at most `step / 2`."""
        return ~(jnp.abs(u) <= self.max_value)

    def decode(
        self, total: Int[Array, "*shape"], count: Int[Array, ""], like: jax.Array
    ) -> Float[Array, "*shape"]:
        """Return the mean from a sum of `count` codes, in the dtype of a mean of `like`."""
        return (self.step * total / jnp.maximum(count, 1)).astype(mean_dtype(like))
