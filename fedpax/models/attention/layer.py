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
      query: [width, heads, head_width].
      key: [width, key_value_heads, head_width], as is `value`.
      value: see `key`.
      output: [heads, head_width, width].

    Reference: Ainslie et al., "GQA" (arXiv:2305.13245), section 2.2.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_value_heads: int,
        head_width: int,
        *,
        output_scale: float,
        quantization: Quantization = "none",
        rngs: nnx.Rngs,
    ):
        """Draws the projections with variance 1 / inputs, the output's times `output_scale`^2."""
        self.quantization = quantization
        deviation = width**-0.5
        shape = (width, key_value_heads, head_width)
        names = ("embed", "key_value_heads", "head_width")
        self.query = normal(
            rngs, (width, heads, head_width), deviation, ("embed", "heads", "head_width")
        )
        self.key = normal(rngs, shape, deviation, names)
        self.value = normal(rngs, shape, deviation, names)
        self.output = normal(
            rngs,
            (heads, head_width, width),
            output_scale * (heads * head_width) ** -0.5,
            ("heads", "head_width", "embed"),
        )

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, Any]:
        """Attends within x [batch, sequence, width].

        Args:
          x: [batch, sequence, width].
          rotation: what `rotary` returns.
          attend: `attend(query, key, value)` with each [batch, sequence, heads, head_width], keys
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
    head_width: int,
    base: float,
    *,
    scaling: float | None = None,
    length: int = 8192,
) -> tuple[jax.Array, jax.Array]:
    """Computes the angles by which `rotate` turns each pair of features.

    Pair i of position p turns by p f_i with f_i = base^(-2 i / head_width). With `scaling`, pairs
    that turn less than once in `length` tokens turn `scaling` times slower, those that turn four
    times or more as before, and those between by a mean of both that is linear in their turns.

    Args:
      positions: int32 [batch, sequence], a token's place in its document.
      head_width: number of features of a head, even.
      base: largest wavelength over 2 pi, in tokens.
      scaling: by how much the longest wavelengths are stretched; None for not at all.
      length: tokens that the unstretched wavelengths were meant for.

    Returns:
      Cosine and sine, each float32 [batch, sequence, 1, head_width / 2].

    Reference: Su et al., "RoFormer" (arXiv:2104.09864), section 3.2; the scaling is that of Llama
    3.1 (arXiv:2407.21783).

    Example:
      >>> cosine, sine = rotary(jnp.arange(3)[None], head_width=4, base=100.0)
      >>> cosine.shape, round(float(sine[0, 2, 0, 1]), 4)  # sin(2 / 10)
      ((1, 3, 1, 2), 0.1987)
    """
    frequencies = base ** (-jnp.arange(0, head_width, 2) / head_width)
    if scaling is not None:
        turns = length * frequencies / (2 * jnp.pi)
        unscaled = jnp.clip((turns - 1) / 3, 0, 1)
        frequencies *= unscaled + (1 - unscaled) / scaling
    angles = positions[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns feature i and feature i + head_width / 2 of each head as a pair, by its angle.

    The product of a query and a key then depends on the distance of their positions alone.

    Args:
      x: [batch, sequence, heads, head_width].
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
    length: int, segments: jax.Array | None = None, window: int | None = None
) -> jax.Array:
    """Says which tokens each token sees: itself and those before it in its own document.

    Args:
      length: number of tokens in a sequence.
      segments: int32 [batch, sequence], which document of a packed sequence a token belongs to.
      window: how many tokens a token sees, itself and those just before it; None for all.

    Returns:
      Boolean [batch, query, key], batch 1 without segments.

    Example:
      >>> attention_mask(3, jnp.array([[1, 1, 2]])).astype(int)[0].tolist()
      [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
      >>> attention_mask(3, window=2).astype(int)[0].tolist()
      [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    places = jnp.arange(length)
    mask = visible(places, places, window)[None]
    return mask if segments is None else mask & (segments[:, :, None] == segments[:, None, :])


def visible(queries: jax.Array, keys: jax.Array, window: int | None = None) -> jax.Array:
    """Says whether a query sees a key, by their places alone: [..., queries, keys]."""
    distance = queries[..., :, None] - keys[..., None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes softmax(query key^T / sqrt(head_width)) value for each head, in float32 inside.

    Args:
      query: [batch, sequence, heads, head_width].
      key: [batch, sequence, key_value_heads, head_width]; head h of the queries uses head
        h // (heads / key_value_heads).
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
    batch, length, heads, head_width = query.shape
    groups = key.shape[2]
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, length, groups, heads // groups, head_width)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=accurate)
    scores = jnp.where(mask[:, None, None], scores * head_width**-0.5, jnp.finfo(accurate).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(query.shape)
