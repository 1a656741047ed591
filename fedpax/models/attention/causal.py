"""Causal attention by one of several implementations, chosen by name or by platform."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from fedpax.errors import ArgumentError
from fedpax.models.attention.layer import attention_mask, masked_attention, visible
from fedpax.ops.remat import ATTENTION
from fedpax.ops.ring_attention import ring_attention
from fedpax.ops.splash_attention import splash_attention, splash_supports

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

    - "einsum": two einsums with the scores between them. Longer sequences that 512 divides run by
      blocks of 512 queries, so scores of [seq_len, seq_len] never exist.
    - "xla": `jax.nn.dot_product_attention`, with all scores at once.
    - "cudnn": the flash attention of the same function, for NVIDIA GPUs, float16 or bfloat16.
    - "splash": JAX's flash attention kernel for TPUs, which skips blocks that are fully masked. On
      a mesh each device runs it on its own rows and heads.
    - "auto", the first that applies:

      1. `fedpax.ops.ring_attention` where the mesh shards sequences by an automatic
         axis `sequence`;
      2. "splash" on TPU, for sizes that `splash_supports`;
      3. "cudnn" on GPU, for dtypes of two bytes and a head_dim of 8, 16, ... 128;
      4. "einsum".

      The platform is the mesh's in context, also if the program is only compiled for it;
      without a mesh it is JAX's default.

    Args:
        query: `[batch, seq_len, num_heads, head_dim]`.
        key: `[batch, seq_len, num_kv_heads, head_dim]`. Query head h uses key head
            h // (num_heads / num_kv_heads).
        value: as `key`.
        segments: int32 `[batch, seq_len]`, the document of each token in a packed sequence.
            Default None: one document per row.
        sliding_window: number of tokens that a token attends to: itself and those just before it.
            Default None: all earlier tokens.
        implementation: one of the above.

    Returns:
        The shape and dtype of `query`.

    Raises:
        ValueError: "splash" or "cudnn" does not support these sizes or this dtype, or was chosen
            on another platform than its own.

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
    # It is the platform of the mesh in context, also for a plan without the hardware. Without a
    # mesh, it is the platform of JAX's default device.
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
