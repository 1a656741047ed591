"""Parts of the transformer: the feed-forward network, and a whole layer."""

from __future__ import annotations

import chex
import jax
from flax import nnx
from jaxtyping import Array, Float

from fedpax.models.attention.layer import Attention, AttentionFn
from fedpax.models.mixture_of_experts import MixtureOfExperts
from fedpax.models.parameters import normal_param, project
from fedpax.models.rms_norm import RMSNorm
from fedpax.models.transformer_config import TransformerConfig
from fedpax.ops.quantization import Quantization
from fedpax.parallel.axes import constrain, explicit_spec


class FeedForward(nnx.Module):
    """Feed-forward network: SwiGLU, down (silu(gate x) * (up x)), or GELU, down gelu(up x)."""

    # Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.

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
            self.gate = normal_param(rngs, (embed_dim, mlp_dim), embed_dim**-0.5, ("embed", "mlp"))
        self.up = normal_param(rngs, (embed_dim, mlp_dim), embed_dim**-0.5, ("embed", "mlp"))
        self.down = normal_param(
            rngs, (mlp_dim, embed_dim), output_scale * mlp_dim**-0.5, ("mlp", "embed")
        )

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Map x [batch, seq_len, embed_dim] to the same shape."""
        up = project("btw,wm->btm", x, self.up, quantization=self.quantization)
        if self.gated:
            gate = project("btw,wm->btm", x, self.gate, quantization=self.quantization)
            inner = nnx.silu(gate) * up
        else:
            inner = nnx.gelu(up)
        out = explicit_spec(("batch", "sequence", None), x.shape)
        return project("btm,mw->btw", inner, self.down, out, quantization=self.quantization)


class Layer(nnx.Module):
    """A pre-norm transformer layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        # 2 * num_layers branches add to the residual stream; this keeps the scale of their sum.
        output_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = RMSNorm(config.embed_dim, epsilon=config.norm_eps)
        self.attention = Attention(
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            config.resolved_head_dim,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            output_scale=output_scale,
            quantization=config.quantization,
            rngs=rngs,
        )
        self.feed_forward_norm = RMSNorm(config.embed_dim, epsilon=config.norm_eps)
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
        self,
        x: Float[Array, "batch seq embed"],
        rotation: tuple[jax.Array, jax.Array],
        attend: AttentionFn,
    ) -> tuple[Float[Array, "batch seq embed"], dict[str, jax.Array], chex.ArrayTree]:
        """Apply the layer; return its output, auxiliary losses, and the cache entry of `attend`."""
        attended, cache = self.attention(self.attention_norm(x), rotation, attend)
        x = x + attended
        y = self.feed_forward(self.feed_forward_norm(x))
        y, auxiliary = y if isinstance(y, tuple) else (y, {})
        return constrain(x + y, ("batch", "sequence", None)), auxiliary, cache
