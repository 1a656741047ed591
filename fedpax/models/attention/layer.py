"""Grouped-query attention over packed sequences, with rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from fedpax.models.parameters import normal, project
from fedpax.models.quantization import Quantization
from fedpax.parallel.axes import explicit_spec

Attend: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""How queries meet keys and values: the result, and what its caller wants to keep, if anything."""


class Attention(nnx.Module):
    """Causal attention whose queries share keys and values in groups.

    Attributes:
      query: [embed_dim, num_heads, head_dim].
      key: [embed_dim, num_kv_heads, head_dim], as is `value`.
      value: see `key`.
      output: [num_heads, head_dim, embed_dim].

    Reference: Ainslie et al., "GQA" (arXiv:2305.13245), section 2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        output_scale: float,
        quantization: Quantization = "none",
        rngs: nnx.Rngs,
    ):
        """Draws the projections with variance 1 / inputs, the output's times `output_scale`^2."""
        self.quantization = quantization
        deviation = embed_dim**-0.5
        shape = (embed_dim, num_kv_heads, head_dim)
        names = ("embed", "kv_heads", "head_dim")
        self.query = normal(
            rngs, (embed_dim, num_heads, head_dim), deviation, ("embed", "heads", "head_dim")
        )
        self.key = normal(rngs, shape, deviation, names)
        self.value = normal(rngs, shape, deviation, names)
        self.output = normal(
            rngs,
            (num_heads, head_dim, embed_dim),
            output_scale * (num_heads * head_dim) ** -0.5,
            ("heads", "head_dim", "embed"),
        )

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, Any]:
        """Attends within x [batch, sequence, embed_dim].

        Args:
          x: [batch, sequence, embed_dim].
          rotation: what `rotary` returns.
          attend: `attend(query, key, value)` with each [batch, sequence, num_heads, head_dim], keys
            and values with their own number of heads.

        Returns:
          The shape of x, and what `attend` wants to keep.
        """
        query = project("btw,whd->bthd", x, self.query, quantization=self.quantization)
        key = project("btw,whd->bthd", x, self.key, quantization=self.quantization)
        value = project("btw,whd->bthd", x, self.value, quantization=self.quantization)
        attended, kept = attend(rotate(query, rotation), rotate(key, rotation), value)
        out = explicit_spec(("batch", "sequence", None), x.shape)
        y = project("bthd,hdw->btw", attended, self.output, out, quantization=self.quantization)
        return y, kept


def rotary(
    positions: jax.Array,
    head_dim: int,
    base: float,
    *,
    scaling_factor: float | None = None,
    original_seq_len: int = 8192,
) -> tuple[jax.Array, jax.Array]:
    """Computes the angles by which `rotate` turns each pair of features.

    Pair i of position p turns by p f_i with f_i = base^(-2 i / head_dim). With `scaling_factor`, pairs
    that turn less than once in `original_seq_len` tokens turn `scaling_factor` times slower, those that turn four
    times or more as before, and those between by a mean of both that is linear in their turns.

    Args:
      positions: int32 [batch, sequence], a token's place in its document.
      head_dim: number of features of a head, even.
      base: largest wavelength over 2 pi, in tokens.
      scaling_factor: by how much the longest wavelengths are stretched; None for not at all.
      original_seq_len: tokens that the unstretched wavelengths were meant for.

    Returns:
      Cosine and sine, each float32 [batch, sequence, 1, head_dim / 2].

    Reference: Su et al., "RoFormer" (arXiv:2104.09864), section 3.2; the scaling is that of Llama
    3.1 (arXiv:2407.21783).

    Example:
      >>> cosine, sine = rotary(jnp.arange(3)[None], head_dim=4, base=100.0)
      >>> cosine.shape, round(float(sine[0, 2, 0, 1]), 4)  # sin(2 / 10)
      ((1, 3, 1, 2), 0.1987)
    """
    frequencies = base ** (-jnp.arange(0, head_dim, 2) / head_dim)
    if scaling_factor is not None:
        turns = original_seq_len * frequencies / (2 * jnp.pi)
        unscaled = jnp.clip((turns - 1) / 3, 0, 1)
        frequencies *= unscaled + (1 - unscaled) / scaling_factor
    angles = positions[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns feature i and feature i + head_dim / 2 of each head as a pair, by its angle.

    The product of a query and a key then depends on the distance of their positions alone.

    Args:
      x: [batch, sequence, num_heads, head_dim].
      rotation: what `rotary` returns.

    Returns:
      The same shape and dtype as x.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
      >>> y = rotate(x, rotary(jnp.arange(3)[None], 4, 100.0))
      >>> bool(jnp.allclose(jnp.linalg.norm(x, axis=-1), jnp.linalg.norm(y, axis=-1)))
      True
    """
    cosine, sine = (r.astype(x.dtype) for r in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def attention_mask(
    seq_len: int, segments: jax.Array | None = None, sliding_window: int | None = None
) -> jax.Array:
    """Says which tokens each token sees: itself and those before it in its own document.

    Args:
      seq_len: number of tokens in a sequence.
      segments: int32 [batch, sequence], which document of a packed sequence a token belongs to.
      sliding_window: how many tokens a token sees, itself and those just before it; None for all.

    Returns:
      Boolean [batch, query, key], batch 1 without segments.

    Example:
      >>> attention_mask(3, jnp.array([[1, 1, 2]])).astype(int)[0].tolist()
      [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
      >>> attention_mask(3, sliding_window=2).astype(int)[0].tolist()
      [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    places = jnp.arange(seq_len)
    mask = visible(places, places, sliding_window)[None]
    return mask if segments is None else mask & (segments[:, :, None] == segments[:, None, :])


def visible(queries: jax.Array, keys: jax.Array, sliding_window: int | None = None) -> jax.Array:
    """Says whether a query sees a key, by their places alone: [..., queries, keys]."""
    distance = queries[..., :, None] - keys[..., None, :]
    return (
        distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    )


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes softmax(query key^T / sqrt(head_dim)) value for each head, in float32 inside.

    Args:
      query: [batch, sequence, num_heads, head_dim].
      key: [batch, sequence, num_kv_heads, head_dim]; head h of the queries uses head
        h // (num_heads / num_kv_heads).
      value: as key.
      mask: boolean [batch, query, key], with at least one key for each query.

    Returns:
      The shape and dtype of query.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
      >>> y = attend(x, x, x, attention_mask(3))
      >>> y.shape, bool(jnp.allclose(y[:, 0], x[:, 0]))  # the first token sees itself alone
      ((1, 3, 2, 4), True)
    """
    batch, seq_len, num_heads, head_dim = query.shape
    groups = key.shape[2]
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, seq_len, groups, num_heads // groups, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=accurate)
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, jnp.finfo(accurate).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(query.shape)
