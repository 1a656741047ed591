"""Causal attention by one of several implementations, chosen by name or by platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int

from fedpax.errors import ArgumentError
from fedpax.models.layers import RMSNorm, normal_param, project
from fedpax.ops.quantization import Quantization
from fedpax.ops.remat import ATTENTION
from fedpax.ops.ring_attention import ring_attention
from fedpax.ops.splash_attention import splash_attention, splash_supports
from fedpax.parallel.axes import explicit_spec

Implementation: TypeAlias = Literal["auto", "einsum", "xla", "cudnn", "splash"]
"""The names of the implementations of attention; "auto" chooses one by the device."""

QUERY_BLOCK = 512
"""Block of queries of the implementation "einsum", for longer sequences that it divides."""


def causal_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    *,
    sliding_window: int | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute softmax(query key^T / sqrt(head_dim)) value over each token's visible keys.

    The implementations:

    - "einsum": two einsums, by blocks of 512 queries for longer sequences that 512 divides.
    - "xla": `jax.nn.dot_product_attention`, with all scores at once.
    - "cudnn": the flash attention of the same function, for NVIDIA GPUs, float16 or bfloat16.
    - "splash": JAX's flash attention kernel for TPUs, which skips blocks that are fully masked.
    - "auto", the first that applies: `fedpax.ops.ring_attention` where the mesh shards sequences by
      an automatic axis `sequence`; "splash" on TPU, for sizes that `splash_supports`; "cudnn" on
      GPU, for dtypes of two bytes and a head_dim of 8, 16, ... 128; "einsum". The platform is that
      of the mesh in context, or else JAX's default.

    Args:
        query: `[batch, seq_len, num_heads, head_dim]`.
        key: `[batch, seq_len, num_kv_heads, head_dim]`. Query head h uses key head
            h // (num_heads / num_kv_heads).
        value: as `key`.
        segments: int32 `[batch, seq_len]`, the document of each token in a packed sequence.
            Default None: one document per row.
        sliding_window: number of tokens that a token attends to, itself included. Default None: all
            earlier tokens.
        implementation: one of the above.

    Returns:
        The shape and dtype of `query`.

    Raises:
        ValueError: "splash" or "cudnn" does not support these sizes, this dtype or this platform.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
        >>> y = causal_attention(x, x, x, sliding_window=1)  # each token attends to itself alone
        >>> bool(jnp.allclose(x, y))
        True
    """
    chosen = _choose(query) if implementation == "auto" else implementation
    if chosen == "splash":  # its kernel applies checkpoint_name itself
        if splash_supports(query) and platform() != "tpu":
            raise ArgumentError(
                f"attention='splash' on {platform()}: it is a kernel for TPUs. Use "
                "attention='auto' to choose an implementation for the platform."
            )
        return splash_attention(query, key, value, segments, sliding_window=sliding_window)
    attended = _attend(query, key, value, segments, sliding_window, chosen)
    return checkpoint_name(attended, ATTENTION)


def platform() -> str:
    """Return the platform that the program is compiled for: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()  # "gpu" for all GPUs; a mesh may say "cuda" or "rocm"
    return device.platform if device.platform in ("cpu", "tpu") else "gpu"


def _choose(query: jax.Array) -> Implementation | Literal["ring"]:
    if _mesh_shards_sequences(query.shape[1]):
        return "ring"
    if platform() == "tpu" and splash_supports(query):
        return "splash"
    return "cudnn" if _cudnn_supports(query) else "einsum"


def _cudnn_supports(query: jax.Array) -> bool:
    head_dim = query.shape[-1]
    fits = query.dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128
    return platform() == "gpu" and fits


def _mesh_shards_sequences(seq_len: int) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    automatic = kinds.get("sequence") is AxisType.Auto
    return automatic and mesh.shape["sequence"] > 1 and seq_len % mesh.shape["sequence"] == 0


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    sliding_window: int | None,
    implementation: Implementation | Literal["ring"],
) -> jax.Array:
    seq_len = query.shape[1]
    if implementation == "ring":
        return ring_attention(query, key, value, segments, sliding_window=sliding_window)
    if implementation == "xla":
        mask = attention_mask(seq_len, segments, sliding_window)[:, None]
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")
    if implementation == "cudnn":
        if not _cudnn_supports(query):
            raise ArgumentError(
                f"attention='cudnn' on {platform()} with {query.dtype} and "
                f"head_dim={query.shape[-1]}: cuDNN's flash attention is for GPUs, bfloat16 or "
                "float16, and a head_dim of 8, 16, ... 128. Use attention='auto' to choose an "
                "implementation for the platform."
            )
        same = None
        if segments is not None:
            same = (segments[:, :, None] == segments[:, None, :])[:, None]
        before = None if sliding_window is None else (sliding_window - 1, 0)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=same,
            is_causal=True,
            local_window_size=before,
            implementation="cudnn",
        )
    if seq_len > QUERY_BLOCK and seq_len % QUERY_BLOCK == 0:
        return _attend_by_blocks(query, key, value, segments, sliding_window)
    return masked_attention(query, key, value, attention_mask(seq_len, segments, sliding_window))


def _attend_by_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    sliding_window: int | None,
) -> jax.Array:
    """Attend with one block of queries after another; recompute the scores in the backward pass."""
    batch, seq_len, num_heads, head_dim = query.shape
    blocks = seq_len // QUERY_BLOCK
    # With a sliding window, a block of queries needs only the keys of the window before it.
    before = (
        seq_len if sliding_window is None else -(-(sliding_window - 1) // QUERY_BLOCK) * QUERY_BLOCK
    )
    seen = min(seq_len, before + QUERY_BLOCK)

    def step(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        index, queries = block
        start = index * QUERY_BLOCK
        first = jnp.maximum(0, start + QUERY_BLOCK - seen)

        def take(x: jax.Array) -> jax.Array:
            return x if seen == seq_len else jax.lax.dynamic_slice_in_dim(x, first, seen, 1)

        mask = visible(start + jnp.arange(QUERY_BLOCK), first + jnp.arange(seen), sliding_window)[
            None
        ]
        if segments is not None:
            query_segments = jax.lax.dynamic_slice_in_dim(segments, start, QUERY_BLOCK, 1)
            mask &= query_segments[:, :, None] == take(segments)[:, None, :]
        return None, masked_attention(queries, take(key), take(value), mask)

    split = query.reshape(batch, blocks, QUERY_BLOCK, num_heads, head_dim).swapaxes(0, 1)
    body = jax.checkpoint(step, prevent_cse=False)
    _, attended = jax.lax.scan(body, None, (jnp.arange(blocks), split))
    return attended.swapaxes(0, 1).reshape(query.shape)


# ---- grouped-query attention over packed sequences, with rotary positions

AttentionFn: TypeAlias = Callable[
    [jax.Array, jax.Array, jax.Array], tuple[jax.Array, chex.ArrayTree]
]
"""Computes attention: (query, key, value) -> (result, cache entry or None)."""


class Attention(nnx.Module):
    """Multi-head attention whose query heads share key and value heads in groups (GQA)."""

    # GQA (arXiv:2305.13245), section 2.2; Qwen3 (arXiv:2505.09388), section 2, for QK-Norm.

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        output_scale: float,
        qk_norm_eps: float | None = None,
        quantization: Quantization = "none",
        rngs: nnx.Rngs,
    ):
        """Initialize with variance 1 / fan-in; multiply the output projection by `output_scale`."""
        self.quantization, self.qk_norm = quantization, qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.query_norm = RMSNorm(head_dim, epsilon=qk_norm_eps)
            self.key_norm = RMSNorm(head_dim, epsilon=qk_norm_eps)
        stddev = embed_dim**-0.5
        shape = (embed_dim, num_kv_heads, head_dim)
        names = ("embed", "kv_heads", "head_dim")
        self.query = normal_param(
            rngs, (embed_dim, num_heads, head_dim), stddev, ("embed", "heads", "head_dim")
        )
        self.key = normal_param(rngs, shape, stddev, names)
        self.value = normal_param(rngs, shape, stddev, names)
        self.output = normal_param(
            rngs,
            (num_heads, head_dim, embed_dim),
            output_scale * (num_heads * head_dim) ** -0.5,
            ("heads", "head_dim", "embed"),
        )

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        rotation: tuple[jax.Array, jax.Array],
        attend: AttentionFn,
    ) -> tuple[Float[Array, "batch seq embed"], chex.ArrayTree]:
        """Attend within each row of x."""
        query = project("btw,whd->bthd", x, self.query, quantization=self.quantization)
        key = project("btw,whd->bthd", x, self.key, quantization=self.quantization)
        value = project("btw,whd->bthd", x, self.value, quantization=self.quantization)
        if self.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        attended, cache = attend(rotate(query, rotation), rotate(key, rotation), value)
        out = explicit_spec(("batch", "sequence", None), x.shape)
        y = project("bthd,hdw->btw", attended, self.output, out, quantization=self.quantization)
        return y, cache


def rotary(
    positions: Int[Array, "batch seq"],
    head_dim: int,
    base: float,
    *,
    scaling_factor: float | None = None,
    original_seq_len: int = 8192,
) -> tuple[Float[Array, "batch seq 1 pairs"], Float[Array, "batch seq 1 pairs"]]:
    """Compute cosines and sines, `[batch, seq_len, 1, head_dim / 2]`, by which `rotate` rotates."""
    # Pair i at position p rotates by the angle p f_i with f_i = base^(-2 i / head_dim). With
    # `scaling_factor`, wavelengths longer than `original_seq_len` are multiplied by it, wavelengths
    # shorter than a quarter of that stay, and frequencies between are interpolated linearly.
    # RoFormer (arXiv:2104.09864), section 3.2; Llama 3.1 (arXiv:2407.21783).
    frequencies = base ** (-jnp.arange(0, head_dim, 2) / head_dim)
    if scaling_factor is not None:
        rotations = original_seq_len * frequencies / (2 * jnp.pi)
        unscaled = jnp.clip((rotations - 1) / 3, 0, 1)
        frequencies *= unscaled + (1 - unscaled) / scaling_factor
    angles = positions[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "batch seq heads head_dim"], rotation: tuple[jax.Array, jax.Array]
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate feature i and feature i + head_dim / 2 of each head as a pair."""
    cosine, sine = (r.astype(x.dtype) for r in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def attention_mask(
    seq_len: int, segments: jax.Array | None = None, sliding_window: int | None = None
) -> jax.Array:
    """Make the mask `[batch, query, key]` of causal attention within documents and a window."""
    # batch is 1 without segments.
    positions = jnp.arange(seq_len)
    mask = visible(positions, positions, sliding_window)[None]
    return mask if segments is None else mask & (segments[:, :, None] == segments[:, None, :])


def visible(queries: jax.Array, keys: jax.Array, sliding_window: int | None = None) -> jax.Array:
    """Make the mask [..., queries, keys] of positions: causal, within the sliding window."""
    distance = queries[..., :, None] - keys[..., None, :]
    return (
        distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    )


def masked_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    mask: Bool[Array, "#batch queries keys"],
) -> Float[Array, "batch queries heads head_dim"]:
    """Compute softmax(query key^T / sqrt(head_dim)) value for each head, with float32 scores."""
    # The mask has at least one key for each query.
    batch, seq_len, num_heads, head_dim = query.shape
    groups = key.shape[2]
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, seq_len, groups, num_heads // groups, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=accurate)
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, jnp.finfo(accurate).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(query.shape)
