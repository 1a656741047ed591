"""Parts of the transformer: normalization, the feed-forward network, and the layer of both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fedpax.models.attention.layer import Attend, Attention
from fedpax.models.mixture import MixtureOfExperts
from fedpax.models.parameters import normal, project
from fedpax.models.quantization import Quantization
from fedpax.models.transformer_config import TransformerConfig
from fedpax.parallel.axes import constrain, explicit_spec


class RMSNorm(nnx.Module):
    """Divides each token's features by their root mean square, and scales them.

    Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """

    def __init__(self, embed_dim: int):
        self.scale = nnx.Param(jnp.ones(embed_dim), logical_axes=("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes x [..., embed_dim]: in float32 inside, x's dtype outside."""
        accurate = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(accurate), axis=-1, keepdims=True)
        return (accurate * jax.lax.rsqrt(mean_square + 1e-6) * self.scale[...]).astype(x.dtype)


class FeedForward(nnx.Module):
    """SwiGLU, down (silu(gate x) * (up x)), or without a gate down gelu(up x).

    Reference: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        gated: bool = True,
        output_scale: float,
        quantization: Quantization = "none",
        rngs: nnx.Rngs,
    ):
        self.gated, self.quantization = gated, quantization
        if gated:
            self.gate = normal(rngs, (embed_dim, mlp_dim), embed_dim**-0.5, ("embed", "mlp"))
        self.up = normal(rngs, (embed_dim, mlp_dim), embed_dim**-0.5, ("embed", "mlp"))
        self.down = normal(
            rngs, (mlp_dim, embed_dim), output_scale * mlp_dim**-0.5, ("mlp", "embed")
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [batch, sequence, embed_dim] to the same shape."""
        up = project("btw,wm->btm", x, self.up, quantization=self.quantization)
        if self.gated:
            gate = project("btw,wm->btm", x, self.gate, quantization=self.quantization)
            inner = nnx.silu(gate) * up
        else:
            inner = nnx.gelu(up)
        out = explicit_spec(("batch", "sequence", None), x.shape)
        return project("btm,mw->btw", inner, self.down, out, quantization=self.quantization)


class Layer(nnx.Module):
    """Attention and a feed-forward network, each on normalized inputs and added to them.

    Attributes:
      attention_norm: normalizes what attention gets.
      attention: see `fedpax.models.attention.layer.Attention`.
      feed_forward_norm: normalizes what the feed-forward network gets.
      feed_forward: the network, or a mixture of experts if the configuration has experts.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        # Each of the 2 * layers branches adds to the features: their sum keeps its scale.
        output_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = RMSNorm(config.embed_dim)
        self.attention = Attention(
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            config.resolved_head_dim,
            output_scale=output_scale,
            quantization=config.quantization,
            rngs=rngs,
        )
        self.feed_forward_norm = RMSNorm(config.embed_dim)
        self.feed_forward: FeedForward | MixtureOfExperts
        if config.num_experts:
            self.feed_forward = MixtureOfExperts(
                config.embed_dim,
                config.mlp_dim,
                config.num_experts,
                config.num_experts_per_token,
                output_scale=output_scale,
                quantization=config.quantization,
                rngs=rngs,
            )
        else:
            self.feed_forward = FeedForward(
                config.embed_dim,
                config.mlp_dim,
                gated=config.feed_forward == "swiglu",
                output_scale=output_scale,
                quantization=config.quantization,
                rngs=rngs,
            )

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, dict[str, jax.Array], Any]:
        """Computes the layer.

        Args:
          x: [batch, sequence, embed_dim].
          rotation: what `fedpax.models.attention.layer.rotary` returns.
          attend: how queries meet keys and values.

        Returns:
          The shape of x; auxiliary losses, float32 scalars by name, none without a mixture of
          experts; and what `attend` wants to keep.
        """
        attended, kept = self.attention(self.attention_norm(x), rotation, attend)
        x = x + attended
        y = self.feed_forward(self.feed_forward_norm(x))
        y, auxiliary = y if isinstance(y, tuple) else (y, {})
        return constrain(x + y, ("batch", "sequence", None)), auxiliary, kept
