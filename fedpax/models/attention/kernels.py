"""Causal attention by one of several implementations, chosen by name or by the platform."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from fedpax.models.attention.layer import attend, attention_mask, visible
from fedpax.models.attention.ring import ring_attention
from fedpax.models.attention.splash import splash_attention, splash_supports
from fedpax.models.remat import ATTENTION

Implementation: TypeAlias = Literal["auto", "einsum", "xla", "cudnn", "splash"]

QUERIES = 512
"""Queries that "einsum" takes at once where a sequence has several times as many."""


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    *,
    sliding_window: int | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Computes softmax(query key^T / sqrt(head_dim)) value, each token over those that it sees.

    The implementations:

    - "einsum": two products with the scores between them, by queries of 512 where a sequence is a
      multiple of that and longer, so that scores of [tokens, tokens] never exist.
    - "xla": `jax.nn.dot_product_attention`, with all scores at once.
    - "cudnn": the same function's flash attention, for NVIDIA GPUs, float16 or bfloat16.
    - "splash": JAX's flash attention kernel for TPUs, which skips blocks that no query sees. On a
      mesh each device runs it on its own rows and heads.
    - "auto": where the mesh cuts sequences, by an automatic axis `sequence`,
      `fedpax.models.attention.ring.ring_attention`. Else "splash" on TPU where it can
      (`splash_supports`), "cudnn" on GPU where it can (two bytes a number, a head width of 8, 16,
      ... 128), and "einsum". The platform is that of the mesh in context, also of one that is only
      compiled for, or without a mesh JAX's default.

    Args:
      query: [batch, sequence, num_heads, head_dim].
      key: [batch, sequence, num_kv_heads, head_dim]; head h of the queries uses head
        h // (num_heads / num_kv_heads).
      value: as key.
      segments: int32 [batch, sequence], which document of a packed sequence a token belongs to.
      sliding_window: how many tokens a token sees, itself and those just before it; None for all.
      implementation: one of the above.

    Returns:
      The shape and dtype of query.

    Raises:
      ValueError: splash attention or cuDNN's cannot take these sizes or this type, or is asked for
        on another platform than its own.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
      >>> y = causal_attention(x, x, x, sliding_window=1)  # each token sees itself alone
      >>> bool(jnp.allclose(x, y))
      True
    """
    chosen = _best(query) if implementation == "auto" else implementation
    if chosen == "splash":  # which names its result itself, and what else it wants kept
        if splash_supports(query) and platform() != "tpu":
            raise ValueError(
                f"attention='splash' on {platform()}: it is a kernel for TPUs. Set "
                "attention='auto', which takes what there is."
            )
        return splash_attention(query, key, value, segments, sliding_window=sliding_window)
    attended = _attend(query, key, value, segments, sliding_window, chosen)
    return checkpoint_name(attended, ATTENTION)


def platform() -> str:
    """Names the platform that the program at hand is for: "cpu", "gpu" or "tpu".

    It is that of the mesh in context, which may stand on a machine that is not there, else that of
    JAX's default device.

    Example:
      >>> platform() in ("cpu", "gpu", "tpu")
      True
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()  # which calls all GPUs "gpu"; a mesh may say "cuda" or "rocm"
    return device.platform if device.platform in ("cpu", "tpu") else "gpu"


def _best(query: jax.Array) -> Implementation | Literal["ring"]:
    if _sequences_are_cut(query.shape[1]):
        return "ring"
    if platform() == "tpu" and splash_supports(query):
        return "splash"
    return "cudnn" if _cudnn_supports(query) else "einsum"


def _cudnn_supports(query: jax.Array) -> bool:
    head_dim = query.shape[-1]
    fits = query.dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128
    return platform() == "gpu" and fits


def _sequences_are_cut(seq_len: int) -> bool:
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
            raise ValueError(
                f"attention='cudnn' of {query.dtype} with heads of width {query.shape[-1]} on "
                f"{platform()}: cuDNN's flash attention is for GPUs, bfloat16 or float16, and head "
                "widths of 8, 16, ... 128. Set attention='auto', which takes what there is."
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
    if seq_len > QUERIES and seq_len % QUERIES == 0:
        return _by_queries(query, key, value, segments, sliding_window)
    return attend(query, key, value, attention_mask(seq_len, segments, sliding_window))


def _by_queries(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    sliding_window: int | None,
) -> jax.Array:
    """Attends with some queries after the others, and finds their scores again backward."""
    batch, seq_len, num_heads, head_dim = query.shape
    blocks = seq_len // QUERIES
    # With a window, a block of queries sees no more than the keys of the window before it.
    before = seq_len if sliding_window is None else -(-(sliding_window - 1) // QUERIES) * QUERIES
    seen = min(seq_len, before + QUERIES)

    def step(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        index, queries = block
        start = index * QUERIES
        first = jnp.maximum(0, start + QUERIES - seen)

        def take(x: jax.Array) -> jax.Array:
            return x if seen == seq_len else jax.lax.dynamic_slice_in_dim(x, first, seen, 1)

        mask = visible(start + jnp.arange(QUERIES), first + jnp.arange(seen), sliding_window)[None]
        if segments is not None:
            own = jax.lax.dynamic_slice_in_dim(segments, start, QUERIES, 1)
            mask &= own[:, :, None] == take(segments)[:, None, :]
        return None, attend(queries, take(key), take(value), mask)

    split = query.reshape(batch, blocks, QUERIES, num_heads, head_dim).swapaxes(0, 1)
    body = jax.checkpoint(step, prevent_cse=False)
    _, attended = jax.lax.scan(body, None, (jnp.arange(blocks), split))
    return attended.swapaxes(0, 1).reshape(query.shape)
