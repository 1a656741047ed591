"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from fedpax.models.attention import Attention, attention_mask, rotary
from fedpax.models.functional import Functional, functional
from fedpax.models.parameters import normal, project, weight
from fedpax.parallel.axes import constrain, explicit_spec


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder-only transformer with tied embeddings.

    Attributes:
      vocabulary: number of tokens that there are; 256 for bytes.
      layers: number of layers.
      width: features of a token between layers.
      heads: number of query heads.
      key_value_heads: number of key and value heads, which divides `heads`.
      head_width: features of a head, even; width / heads by default.
      mlp_width: features inside the feed-forward network.
      rope_base: largest wavelength of the rotary positions over 2 pi, in tokens.
      dtype: what layers compute in. Parameters are float32 in any case, and so are norms,
        softmax and logits ("float64", for checks, needs JAX's 64-bit mode).
      remat: compute each layer again in the backward pass instead of storing what is inside it.
      unroll: how many layers the scan over layers takes at once; all of them is fastest for a
        shallow model, and takes longest to compile.

    Raises:
      ValueError: the sizes do not fit together.

    Example:
      >>> TransformerConfig(layers=2, width=64, heads=2, key_value_heads=1).parameters()
      237888
    """

    vocabulary: int = 256
    layers: int = 4
    width: int = 192
    heads: int = 3
    key_value_heads: int = 1
    head_width: int | None = None
    mlp_width: int = 512
    rope_base: float = 10_000.0
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    remat: bool = False
    unroll: int = 1

    def __post_init__(self) -> None:
        """Checks that the sizes fit together."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float", "int | None") and value is not None and value <= 0:
                raise ValueError(
                    f"TransformerConfig.{field.name}={value}: expected a positive number."
                )
        if self.heads % self.key_value_heads:
            fitting = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"TransformerConfig.key_value_heads={self.key_value_heads} does not divide "
                f"heads={self.heads}: use one of {fitting}."
            )
        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"TransformerConfig.heads={self.heads} does not divide width={self.width}: change "
                "one of them, or set head_width."
            )
        if self.features_per_head % 2:
            raise ValueError(
                f"TransformerConfig: a head has {self.features_per_head} features, but rotary "
                "positions turn them in pairs: set an even head_width."
            )
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(
                f"TransformerConfig.dtype={self.dtype!r}: use 'float32', 'bfloat16' or 'float64'."
            )

    @property
    def features_per_head(self) -> int:
        """`head_width`, or what follows from width and heads."""
        return self.head_width or self.width // self.heads

    def parameters(self) -> int:
        """Counts the parameters, each of the tied embeddings once."""
        attention = self.width * self.features_per_head * 2 * (self.heads + self.key_value_heads)
        layer = attention + 3 * self.width * self.mlp_width + 2 * self.width
        return self.vocabulary * self.width + self.layers * layer + self.width


class RMSNorm(nnx.Module):
    """Divides each token's features by their root mean square, and scales them.

    Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width), logical=("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes x [..., width]: in float32 inside, x's dtype outside."""
        accurate = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(accurate), axis=-1, keepdims=True)
        return (accurate * jax.lax.rsqrt(mean_square + 1e-6) * self.scale[...]).astype(x.dtype)


class FeedForward(nnx.Module):
    """SwiGLU: output (silu(gate x) * (up x)).

    Reference: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.
    """

    def __init__(self, width: int, mlp_width: int, *, output_scale: float, rngs: nnx.Rngs):
        self.gate = normal(rngs, (width, mlp_width), width**-0.5, ("embed", "mlp"))
        self.up = normal(rngs, (width, mlp_width), width**-0.5, ("embed", "mlp"))
        self.down = normal(
            rngs, (mlp_width, width), output_scale * mlp_width**-0.5, ("mlp", "embed")
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [batch, sequence, width] to the same shape."""
        gate, up = project("btw,wm->btm", x, self.gate), project("btw,wm->btm", x, self.up)
        out = explicit_spec(("batch", "sequence", None), x.shape)
        return project("btm,mw->btw", nnx.silu(gate) * up, self.down, out)


class Layer(nnx.Module):
    """Attention and a feed-forward network, each on normalized inputs and added to them."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        # Each of the 2 * layers branches adds to the features: their sum keeps its scale.
        output_scale = (2 * config.layers) ** -0.5
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(
            config.width,
            config.heads,
            config.key_value_heads,
            config.features_per_head,
            output_scale=output_scale,
            rngs=rngs,
        )
        self.feed_forward_norm = RMSNorm(config.width)
        self.feed_forward = FeedForward(
            config.width, config.mlp_width, output_scale=output_scale, rngs=rngs
        )

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], mask: jax.Array
    ) -> jax.Array:
        """Maps x [batch, sequence, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return constrain(x, ("batch", "sequence", None))


class Transformer(nnx.Module):
    """A decoder-only transformer that predicts the next token.

    The layers' parameters are stacked, and the layers run in a scan, so that a deep model
    compiles as fast as a shallow one.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = normal(
            rngs,
            (config.vocabulary, config.width),
            config.width**-0.5,
            ("vocabulary", "embed"),
        )
        self.layers = _stack(functools.partial(Layer, config), config.layers, rngs)
        self.final_norm = RMSNorm(config.width)

    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Predicts each next token.

        Args:
          tokens: int32 [batch, sequence].
          segments: int32 [batch, sequence], which document of a packed sequence a token belongs
            to; a token sees its own document alone. One document by default.
          positions: int32 [batch, sequence], a token's place in its document. The place in the
            sequence by default.

        Returns:
          Logits, float32 [batch, sequence, vocabulary].
        """
        config = self.config
        length = tokens.shape[1]
        if positions is None:
            positions = jnp.arange(length)[None]
        rotation = rotary(positions, config.features_per_head, config.rope_base)
        mask = attention_mask(length, segments)
        table = weight(self.embedding, config.dtype)
        x = table.at[tokens].get(
            out_sharding=explicit_spec(("batch", "sequence", None), (*tokens.shape, config.width))
        )
        # The table's scale suits the logits; features between layers are of order 1.
        x = constrain(x, ("batch", "sequence", None)) * config.width**0.5

        graph, stacked = nnx.split(self.layers)

        def step(x: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graph, layer)(x, rotation, mask), None

        if config.remat:
            # The scan already keeps the two passes apart, which prevent_cse is there to ensure.
            step = jax.checkpoint(step, prevent_cse=False)
        x, _ = jax.lax.scan(step, x, stacked, unroll=config.unroll)
        logits = jnp.einsum(
            "btw,vw->btv",
            self.final_norm(x),
            table,
            preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
        )
        return constrain(logits, ("batch", "sequence", "vocabulary"))


def _stack(constructor: Callable[..., Layer], count: int, rngs: nnx.Rngs) -> Layer:
    """Makes modules of one kind as one module, whose parameters have the axis "layers" in front."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: constructor(rngs=nnx.Rngs(0))))
    # A loop and not vmap: XLA takes long to compile random bits, and does so once for all layers.
    stacked = jax.lax.map(
        lambda key: nnx.state(constructor(rngs=nnx.Rngs(key))),
        jax.random.split(rngs.params(), count),
    )
    for _, parameter in nnx.to_flat_state(stacked):
        parameter.set_metadata(logical=("layers", *parameter.logical))
    return nnx.merge(graph, stacked)


def transformer(config: TransformerConfig) -> Functional:
    """Makes the transformer as pure functions: `init(key)`, `apply(params, tokens, ...)`.

    Args:
      config: its sizes.

    Returns:
      The model; `apply` takes what `Transformer.__call__` takes.

    Example:
      >>> model = transformer(TransformerConfig(layers=2, width=64, heads=2))
      >>> params = model.init(jax.random.key(0))
      >>> model.apply(params, jnp.zeros((1, 8), int)).shape
      (1, 8, 256)
    """
    return functional(functools.partial(Transformer, config))
