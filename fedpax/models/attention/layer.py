"""Grouped-query attention over packed sequences, with rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from fedpax.models.parameters import normal_param, project
from fedpax.models.rms_norm import RMSNorm
from fedpax.ops.quantization import Quantization
from fedpax.parallel.axes import explicit_spec

AttentionFn: TypeAlias = Callable[
    [jax.Array, jax.Array, jax.Array], tuple[jax.Array, chex.ArrayTree]
]
"""Computes attention: (query, key, value) -> (result, cache entry or None)."""


class Attention(nnx.Module):
    """Multi-head attention whose query heads share key and value heads in groups (GQA)."""

    # Ainslie et al., "GQA" (arXiv:2305.13245), section 2.2; Yang et al., "Qwen3 Technical Report"
    # (arXiv:2505.09388), section 2, for QK-Norm.

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
    # shorter than a quarter of that stay, and frequencies between are interpolated linearly in
    # `original_seq_len` / wavelength.
    # Su et al., "RoFormer" (arXiv:2104.09864), section 3.2; the scaling is the one of Llama 3.1
    # (arXiv:2407.21783).
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
    # The dot product of a rotated query and a rotated key depends only on the distance of their
    # positions.
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
    # Query head h uses key head h // (num_heads / num_kv_heads). The mask has at least one key for
    # each query.
    batch, seq_len, num_heads, head_dim = query.shape
    groups = key.shape[2]
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, seq_len, groups, num_heads // groups, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=accurate)
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, jnp.finfo(accurate).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(query.shape)
