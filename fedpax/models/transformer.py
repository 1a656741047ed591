"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fedpax.errors import ArgumentError
from fedpax.models.attention.causal import Attention, AttentionFn, causal_attention, rotary
from fedpax.models.layers import RMSNorm, gather_weight, normal_param, project
from fedpax.models.mixture_of_experts import MixtureOfExperts
from fedpax.models.nnx_functional import FunctionalModel, functional_model
from fedpax.models.transformer_config import TransformerConfig
from fedpax.ops.quantization import Quantization
from fedpax.ops.remat import rematerialize
from fedpax.ops.splash_attention import LANES
from fedpax.parallel.axes import RULES, constrain, explicit_spec, partition_spec
from fedpax.parallel.pipeline import run_pipeline


class FeedForward(nnx.Module):
    """Feed-forward network: SwiGLU, down (silu(gate x) * (up x)), or GELU, down gelu(up x)."""

    # Shazeer (arXiv:2002.05202), equation 6.

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


__all__ = ["FeedForward", "Layer", "RMSNorm", "Transformer", "TransformerConfig", "transformer"]

AttendLayer: TypeAlias = Callable[
    [chex.ArrayTree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, chex.ArrayTree]
]
"""Computes attention with a cache: (cache, query, key, value) -> (result, cache entry)."""


class Transformer(nnx.Module):
    """A decoder-only transformer that predicts the next token."""

    # The layers' parameters are stacked, `[num_layers, ...]`, or for a pipeline with repeats
    # `[repeats, num_layers / repeats, ...]`, and run in a scan: compile time does not grow with
    # depth.

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        _check_dtype(config)
        self.config = config
        shape, names = (config.vocab_size, config.embed_dim), ("vocab", "embed")
        # Embeddings have variance 1 after scaling. Without scaling the table itself has variance 1,
        # as in torchtitan's Llama 3, unless it is tied: then it needs the scale of the output.
        has_output_scale = config.scale_embeddings or config.tied_embeddings
        stddev = config.embed_dim**-0.5 if has_output_scale else 1.0
        self.embedding = normal_param(rngs, shape, stddev, names)
        self.layers = _stack(
            functools.partial(Layer, config), config.num_layers, config.num_pipeline_repeats, rngs
        )
        self.final_norm = RMSNorm(config.embed_dim, epsilon=config.norm_eps)
        if not config.tied_embeddings:
            self.output = normal_param(rngs, shape, config.embed_dim**-0.5, names)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        segments: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Compute the logits of each next token, float32 `[batch, seq_len, vocab_size]`."""
        # `segments`: the document of each token in a packed sequence, to which its attention is
        # limited; None: one document per row. `positions`: in the documents; None: in the row.
        features, _ = self.hidden(tokens, segments, positions)
        return self.logits(features)

    def hidden(
        self,
        tokens: Int[Array, "batch seq"],
        segments: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], dict[str, Float[Array, ""]]]:
        """Compute normalized features before the output projection; logits are much larger."""
        # Auxiliary losses are float32 scalars by name, summed over layers.
        config = self.config
        graph, stacked = nnx.split(self.layers)

        def step(
            x: jax.Array, layer: nnx.State, shared: chex.ArrayTree
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            rotation, segments = shared

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

    def embed(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Embed tokens [batch, seq_len] as features [batch, seq_len, embed_dim]."""
        config = self.config
        # Looked up in float32: the gradient of a frequent token is a sum of many terms.
        dtype = jnp.promote_types(config.dtype, jnp.float32)
        table = jnp.asarray(self.embedding[...], dtype)
        shape, mesh = (*tokens.shape, config.embed_dim), jax.sharding.get_abstract_mesh()
        axes = jax.tree.leaves(tuple(partition_spec(("embed",), shape=shape[-1:])))
        devices = math.prod(mesh.shape[axis] for axis in axes)
        names: tuple[str | None, ...] = ("batch", "sequence", "embed")
        rules = RULES
        has_few_tokens = (
            tokens.size <= devices * config.vocab_size
        )  # else features outweigh the table
        if devices > 1 and has_few_tokens and config.embed_dim % (devices * LANES) == 0:
            # Each device looks up its columns for all tokens, and sends the features to the tokens'
            # devices: the table and its gradient are never whole on a device. Between slices a TPU
            # would send columns that do not fill its lanes with padding.
            batch = tuple(axis for axis in RULES["batch"] or () if axis not in axes)
            rules = {**RULES, "batch": batch}
        else:
            names, table = ("batch", "sequence", None), constrain(table, ("vocab", None))
        spec = explicit_spec(names, shape, rules)
        x = constrain(table.at[tokens].get(out_sharding=spec), names, rules)
        x = constrain(x.astype(config.dtype), ("batch", "sequence", None))
        return x * config.embed_dim**0.5 if config.scale_embeddings else x

    def rotation(self, positions: jax.Array | None, seq_len: int) -> tuple[jax.Array, jax.Array]:
        """Compute the rotary cosines and sines of positions [batch, seq_len]; None is 0, 1, ..."""
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
        caches: chex.ArrayTree = None,
    ) -> tuple[Float[Array, "batch seq embed"], chex.ArrayTree]:
        """Run the layers one after another, each with a key-value cache of its own."""
        # `caches` and returned entries have a leading axis of layers. Features are not normalized.
        graph, stacked = nnx.split(self.layers)
        if self.config.num_pipeline_repeats > 1:
            stacked = jax.tree.map(lambda p: p.reshape(-1, *p.shape[2:]), stacked)

        def step(
            x: jax.Array, layer: tuple[nnx.State, chex.ArrayTree]
        ) -> tuple[jax.Array, chex.ArrayTree]:
            parameters, cache = layer
            bound: AttentionFn = functools.partial(attend, cache)
            x, _, cache_entry = nnx.merge(graph, parameters)(x, rotation, bound)
            return x, cache_entry

        return jax.lax.scan(step, x, (stacked, caches), unroll=self.config.unroll)

    @property
    def output_table(self) -> nnx.Param:
        """The output projection [vocab_size, embed_dim]: the embedding table, if tied."""
        return self.embedding if self.config.tied_embeddings else self.output

    def logits(self, features: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Map features [batch, seq_len, embed_dim] to logits, float32 [..., vocab_size]."""
        cap = self.config.logit_softcap
        logits = jnp.einsum(
            "btw,vw->btv",
            features,
            gather_weight(self.output_table, self.config.dtype),
            preferred_element_type=jnp.promote_types(features.dtype, jnp.float32),
        )
        if cap is not None:
            logits = cap * jnp.tanh(logits / cap)
        return constrain(logits, ("batch", "sequence", "vocab"))


def _stack(constructor: Callable[..., Layer], count: int, repeats: int, rngs: nnx.Rngs) -> Layer:
    """Make `count` layers as one module whose parameters have a leading axis "layers"."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: constructor(rngs=nnx.Rngs(0))))
    # A loop, not vmap: XLA compiles random bits slowly, and the loop's body is compiled once.
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


def _check_dtype(config: TransformerConfig) -> None:
    if jax.dtypes.canonicalize_dtype(config.dtype) != config.dtype:
        raise ArgumentError(
            f"TransformerConfig.dtype={config.dtype!r} needs JAX's 64-bit mode, which is off: the "
            "layers would compute in float32. Set the environment variable JAX_ENABLE_X64=1, or "
            "use dtype='float32'."
        )


def transformer(config: TransformerConfig) -> FunctionalModel:
    """Make a transformer as pure functions: `init(key)`, `apply(params, tokens, ...)`.

    `apply` takes the arguments of `Transformer.__call__`.

    Raises:
        ValueError: `config.dtype` needs JAX's 64-bit mode, which is off.

    Example:
        >>> model = transformer(TransformerConfig(num_layers=2, embed_dim=64, num_heads=2))
        >>> params = jax.jit(model.init)(jax.random.key(0))
        >>> jax.jit(model.apply)(params, jnp.zeros((1, 8), int)).shape
        (1, 8, 256)
    """
    _check_dtype(config)  # here too, so that the error does not pass through JAX's frames
    return functional_model(Transformer, config)
