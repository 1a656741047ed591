"""Splash attention: JAX's block-sparse flash attention kernel for TPUs, on a device or a mesh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from fedpax.errors import ArgumentError
from fedpax.ops.remat import ATTENTION
from fedpax.parallel.axes import RULES, constrain, entry_axes, partition_spec

LANES = 128
BLOCK = 512


def splash_supports(query: jax.Array) -> bool:
    """Return whether the kernel supports the sizes of a query."""
    # It needs a seq_len that is a multiple of 128, and a head_dim of 64 or a multiple of 128.
    seq_len, head_dim = query.shape[1], query.shape[3]
    return seq_len % LANES == 0 and (head_dim == 64 or head_dim % LANES == 0)


def splash_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    *,
    sliding_window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute causal attention by the kernel; see `fedpax.models.attention.causal_attention`.

    On a mesh it runs in a `jax.shard_map` over the axes in `fedpax.parallel.axes.RULES`, which
    shard the batch and the heads. `interpret` runs the kernel on any platform, slowly, for tests.

    Raises:
        ValueError: the kernel does not support these sizes; see `splash_supports`.
    """
    if not splash_supports(query):
        raise ArgumentError(
            f"attention='splash' got seq_len={query.shape[1]} and head_dim={query.shape[3]}: it "
            "needs a seq_len that is a multiple of 128, and a head_dim of 64 or a multiple of 128. "
            "Use attention='auto', which chooses another implementation for such sizes."
        )
    rows = jnp.zeros(query.shape[:2], jnp.int32) if segments is None else segments
    local = functools.partial(
        _local_attention,
        sliding_window=sliding_window,
        packed=segments is not None,
        interpret=interpret,
    )
    manual = _model_axes()
    if not manual:
        return local(query, key, value, rows)
    names = ("batch", None, "heads", None)
    query_spec = partition_spec(names, shape=query.shape)
    key, value = (_repeat_heads(x, query.shape[2], query_spec[2]) for x in (key, value))
    row_spec = PartitionSpec(query_spec[0], None)
    query, key, value = (constrain(x, names) for x in (query, key, value))
    return jax.shard_map(
        local,
        in_specs=(query_spec, query_spec, query_spec, row_spec),
        out_specs=query_spec,
        axis_names=manual,
        check_vma=False,
    )(query, key, value, constrain(rows, ("batch", None)))


def _local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    *,
    sliding_window: int | None,
    packed: bool,
    interpret: bool,
) -> jax.Array:
    # Imported here, because Pallas takes long to import and other platforms do not need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, seq_len, num_heads, head_dim = query.shape
    mask: Any = masks.CausalMask((seq_len, seq_len))
    if sliding_window is not None and sliding_window < seq_len:
        mask = masks.LocalMask((seq_len, seq_len), (sliding_window - 1, 0), 0)
    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if seq_len % size == 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )

    def one_row(q: jax.Array, k: jax.Array, v: jax.Array, row: jax.Array) -> jax.Array:
        return kernel(q, k, v, kernels.SegmentIds(row, row) if packed else None)

    scaled = query * jnp.asarray(head_dim**-0.5, query.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (scaled, key, value))
    return jax.vmap(one_row)(q, k, v, segments).swapaxes(1, 2).astype(query.dtype)


def _model_axes() -> set[str]:
    """Return the mesh axes that shard a model, or have size 1, and are not manual already."""
    # A kernel compiles only where all mesh axes are manual.
    mesh = jax.sharding.get_abstract_mesh()
    ruled = {axis for axes in RULES.values() for axis in entry_axes(axes)}
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {
        name
        for name, axis_type in types
        if (name in ruled and axis_type is not AxisType.Manual)
        or (mesh.shape[name] == 1 and axis_type is AxisType.Auto)
    }


def _repeat_heads(x: jax.Array, num_heads: int, axes: Any) -> jax.Array:
    """Repeat the heads of keys or values until the mesh axes that shard heads divide them."""
    sizes = jax.sharding.get_abstract_mesh().shape
    parts = math.prod(sizes[name] for name in entry_axes(axes))
    times = parts // math.gcd(parts, x.shape[2])
    if num_heads % (x.shape[2] * times):
        times = num_heads // x.shape[2]
    # Copies of a head are adjacent, as are the query heads that use it.
    return x if times == 1 else jnp.repeat(x, times, axis=2)
