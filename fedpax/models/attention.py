"""Grouped-query attention over packed sequences, with rotary positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from fedpax.models.parameters import normal, project
from fedpax.parallel.axes import explicit_spec


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
        rngs: nnx.Rngs,
    ):
        """Draws the projections with variance 1 / inputs, the output's times `output_scale`^2."""
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
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], mask: jax.Array
    ) -> jax.Array:
        """Attends within x [batch, sequence, width]; see `rotary` and `attention_mask`."""
        query = project("btw,whd->bthd", x, self.query)
        key = project("btw,whd->bthd", x, self.key)
        value = project("btw,whd->bthd", x, self.value)
        attended = attend(rotate(query, rotation), rotate(key, rotation), value, mask)
        out = explicit_spec(("batch", "sequence", None), x.shape)
        return project("bthd,hdw->btw", attended, self.output, out)


def rotary(positions: jax.Array, head_width: int, base: float) -> tuple[jax.Array, jax.Array]:
    """Computes the angles by which `rotate` turns each pair of features.

    Pair i of position p turns by p * base^(-2 i / head_width).

    Args:
      positions: int32 [batch, sequence], a token's place in its document.
      head_width: number of features of a head, even.
      base: largest wavelength over 2 pi, in tokens.

    Returns:
      Cosine and sine, each float32 [batch, sequence, 1, head_width / 2].

    Reference: Su et al., "RoFormer" (arXiv:2104.09864), section 3.2.

    Example:
      >>> cosine, sine = rotary(jnp.arange(3)[None], head_width=4, base=100.0)
      >>> cosine.shape, round(float(sine[0, 2, 0, 1]), 4)  # sin(2 / 10)
      ((1, 3, 1, 2), 0.1987)
    """
    frequencies = base ** (-jnp.arange(0, head_width, 2) / head_width)
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


def attention_mask(length: int, segments: jax.Array | None = None) -> jax.Array:
    """Says which tokens each token sees: itself and those before it in its own document.

    Args:
      length: number of tokens in a sequence.
      segments: int32 [batch, sequence], which document of a packed sequence a token belongs to.

    Returns:
      Boolean [batch, query, key], batch 1 without segments.

    Example:
      >>> attention_mask(3, jnp.array([[1, 1, 2]])).astype(int)[0].tolist()
      [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    return causal if segments is None else causal & (segments[:, :, None] == segments[:, None, :])


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
