"""RMSNorm: the normalization of the transformer's layers, queries and keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Root mean square normalization: x / sqrt(mean(x^2) + epsilon) * scale."""

    # Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).

    def __init__(self, features: int, *, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(features), logical_axes=("norm",))

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Normalize x [..., features]; compute in float32 and return x's dtype."""
        accurate = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(accurate), axis=-1, keepdims=True)
        return (accurate * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...]).astype(
            x.dtype
        )
