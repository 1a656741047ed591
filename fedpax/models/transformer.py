"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fedpax.models.attention.kernels import causal_attention
from fedpax.models.attention.layer import Attend, rotary
from fedpax.models.layers import FeedForward, Layer, RMSNorm
from fedpax.models.nnx_functional import FunctionalModel, to_functional
from fedpax.models.parameters import normal, weight
from fedpax.models.remat import rematerialize
from fedpax.models.transformer_config import TransformerConfig
from fedpax.parallel.axes import constrain, explicit_spec
from fedpax.parallel.pipeline import run_pipeline

__all__ = ["FeedForward", "Layer", "RMSNorm", "Transformer", "TransformerConfig", "transformer"]

AttendLayer = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class Transformer(nnx.Module):
    """A decoder-only transformer that predicts the next token.

    The layers' parameters are stacked, and the layers run in a scan, so that a deep model
    compiles as fast as a shallow one.

    Attributes:
      embedding: [vocab_size, embed_dim], what tokens are looked up in.
      layers: the layers, as one whose parameters are stacked: [layers, ...], or for a pipeline
        with repeats [repeats, layers / repeats, ...], the same numbers in the same order.
      final_norm: normalizes what the last layer gives.
      output: [vocab_size, embed_dim], what logits are made with; absent with tied embeddings.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape, names = (config.vocab_size, config.embed_dim), ("vocab", "embed")
        self.embedding = normal(rngs, shape, config.embed_dim**-0.5, names)
        self.layers = _stack(
            functools.partial(Layer, config), config.num_layers, config.num_pipeline_repeats, rngs
        )
        self.final_norm = RMSNorm(config.embed_dim)
        if not config.tied_embeddings:
            self.output = normal(rngs, shape, config.embed_dim**-0.5, names)

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
          Logits, float32 [batch, sequence, vocab_size].
        """
        features, _ = self.hidden(tokens, segments, positions)
        return self.logits(features)

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes what logits are made of, without the logits, which are much larger.

        Args:
          tokens: as in `__call__`.
          segments: as in `__call__`.
          positions: as in `__call__`.

        Returns:
          Normalized features [batch, sequence, embed_dim] in the layers' dtype, and auxiliary losses,
          float32 scalars by name: the layers' sum of each.
        """
        config = self.config
        graph, stacked = nnx.split(self.layers)

        def step(x: jax.Array, layer: nnx.State, along: Any) -> tuple[jax.Array, Any]:
            rotation, segments = along

            def attend(
                query: jax.Array, key: jax.Array, value: jax.Array
            ) -> tuple[jax.Array, None]:
                attended = causal_attention(
                    query,
                    key,
                    value,
                    segments,
                    sliding_window=config.sliding_window,
                    implementation=config.attention,
                )
                return attended, None

            x, auxiliary, _ = nnx.merge(graph, layer)(x, rotation, attend)
            return x, auxiliary

        x, auxiliary = run_pipeline(
            step,
            stacked,
            self.embed(tokens),
            (self.rotation(positions, tokens.shape[1]), segments),
            num_microbatches=config.num_microbatches,
            num_repeats=config.num_pipeline_repeats,
            remat=functools.partial(rematerialize, policy=config.remat),
            unroll=config.unroll,
        )
        return self.final_norm(x), auxiliary

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up tokens [batch, sequence]: features [batch, sequence, embed_dim]."""
        config = self.config
        # In float32, since a token's gradient is a sum of as many terms as the batch has of it.
        table = jnp.asarray(weight(self.embedding, jnp.promote_types(config.dtype, jnp.float32)))
        spec = explicit_spec(("batch", "sequence", None), (*tokens.shape, config.embed_dim))
        x = table.at[tokens].get(out_sharding=spec).astype(config.dtype)
        # The table's scale suits the logits; features between layers are of order 1.
        return constrain(x, ("batch", "sequence", None)) * config.embed_dim**0.5

    def rotation(self, positions: jax.Array | None, seq_len: int) -> tuple[jax.Array, jax.Array]:
        """Computes the angles of rotary positions [batch, sequence], 0, 1, ... by default."""
        config = self.config
        return rotary(
            jnp.arange(seq_len)[None] if positions is None else positions,
            config.resolved_head_dim,
            config.rope_base,
            scaling_factor=config.rope_scaling_factor,
            original_seq_len=config.rope_original_seq_len,
        )

    def run_cached(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        attend: AttendLayer,
        caches: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Runs the layers one after the other, each with a cache of its own.

        Args:
          x: [batch, sequence, embed_dim].
          rotation: what `rotation` returns.
          attend: `attend(cache, query, key, value)` returns what attention gives, and what to keep
            of the layer.
          caches: a pytree with an axis of the layers in front; none for the first run.

        Returns:
          x after all layers, not normalized, and what they keep, with an axis of the layers in
          front.
        """
        graph, stacked = nnx.split(self.layers)
        if self.config.num_pipeline_repeats > 1:
            stacked = jax.tree.map(lambda p: p.reshape(-1, *p.shape[2:]), stacked)

        def step(x: jax.Array, of_layer: tuple[nnx.State, Any]) -> tuple[jax.Array, Any]:
            parameters, cache = of_layer
            bound: Attend = functools.partial(attend, cache)
            x, _, kept = nnx.merge(graph, parameters)(x, rotation, bound)
            return x, kept

        return jax.lax.scan(step, x, (stacked, caches), unroll=self.config.unroll)

    @property
    def output_table(self) -> nnx.Param:
        """What logits are made with, [vocab_size, embed_dim]: the embedding's table, if tied."""
        return self.embedding if self.config.tied_embeddings else self.output

    def logits(self, features: jax.Array) -> jax.Array:
        """Maps features [batch, sequence, embed_dim] to logits, float32 [..., vocab_size]."""
        cap = self.config.logit_softcap
        logits = jnp.einsum(
            "btw,vw->btv",
            features,
            weight(self.output_table, self.config.dtype),
            preferred_element_type=jnp.promote_types(features.dtype, jnp.float32),
        )
        if cap is not None:
            logits = cap * jnp.tanh(logits / cap)
        return constrain(logits, ("batch", "sequence", "vocab"))


def _stack(constructor: Callable[..., Layer], count: int, repeats: int, rngs: nnx.Rngs) -> Layer:
    """Makes modules of one kind as one module, whose parameters have the axis "layers" in front."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: constructor(rngs=nnx.Rngs(0))))
    # A loop and not vmap: XLA takes long to compile random bits, and does so once for all layers.
    stacked = jax.lax.map(
        lambda key: nnx.state(constructor(rngs=nnx.Rngs(key))),
        jax.random.split(rngs.params(), count),
    )
    names = ("layers",) if repeats == 1 else ("repeats", "layers")
    if repeats > 1:
        stacked = jax.tree.map(lambda p: p.reshape(repeats, -1, *p.shape[1:]), stacked)
    for _, parameter in nnx.to_flat_state(stacked):
        parameter.set_metadata(logical_axes=(*names, *parameter.logical_axes))
    return nnx.merge(graph, stacked)


def transformer(config: TransformerConfig) -> FunctionalModel:
    """Makes the transformer as pure functions: `init(key)`, `apply(params, tokens, ...)`.

    Args:
      config: its sizes.

    Returns:
      The model; `apply` takes what `Transformer.__call__` takes.

    Example:
      >>> model = transformer(TransformerConfig(num_layers=2, embed_dim=64, num_heads=2))
      >>> params = jax.jit(model.init)(jax.random.key(0))
      >>> jax.jit(model.apply)(params, jnp.zeros((1, 8), int)).shape
      (1, 8, 256)
    """
    return to_functional(functools.partial(Transformer, config))
