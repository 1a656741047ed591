"""Splash attention: JAX's block-sparse flash attention kernel for TPUs, on one device or a mesh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AxisType, PartitionSpec

from fedpax.models.remat import ATTENTION
from fedpax.parallel.axes import RULES, constrain, partition_spec

LANES = 128
BLOCK = 512


def splash_supports(query: jax.Array) -> bool:
    """Whether the kernel takes these sizes: 128 n tokens, and heads of 64 or 128 n features.

    Args:
      query: [batch, sequence, num_heads, head_dim].

    Returns:
      Whether it does.

    Example:
      >>> splash_supports(jax.ShapeDtypeStruct((1, 1024, 8, 128), "bfloat16"))
      True
    """
    seq_len, head_dim = query.shape[1], query.shape[3]
    return seq_len % LANES == 0 and (head_dim == 64 or head_dim % LANES == 0)


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    *,
    sliding_window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes causal attention by the kernel; see `fedpax.models.attention.kernels`.

    On a mesh it runs in a `jax.shard_map` that is manual over the model's axes (all that RULES
    name), or over those that are not manual already: batch and heads are sharded as RULES say, and
    a sequence is whole on every device.

    Args:
      query: [batch, sequence, num_heads, head_dim].
      key: [batch, sequence, num_kv_heads, head_dim].
      value: as key.
      segments: int32 [batch, sequence], which document of a packed sequence a token belongs to.
      sliding_window: how many tokens a token sees, itself and those just before it; None for all.
      interpret: run the kernel's operations one by one, on any platform: slow, for tests.

    Returns:
      The shape and dtype of query.

    Raises:
      ValueError: the kernel does not take these sizes; see `splash_supports`.
    """
    if not splash_supports(query):
        raise ValueError(
            f"attention='splash' got {query.shape[1]} tokens and head_dim={query.shape[3]}: it "
            "needs a multiple of 128 tokens, and 64 or a multiple of 128 features. Use "
            "attention='auto', which takes another implementation for such sizes."
        )
    rows = jnp.zeros(query.shape[:2], jnp.int32) if segments is None else segments
    on_device = functools.partial(
        _on_device, sliding_window=sliding_window, packed=segments is not None, interpret=interpret
    )
    manual = _model_axes()
    if not manual:
        return on_device(query, key, value, rows)
    names = ("batch", None, "heads", None)
    of_query = partition_spec(names, shape=query.shape)
    key, value = (_repeated(x, query.shape[2], of_query[2]) for x in (key, value))
    of_rows = PartitionSpec(of_query[0], None)
    query, key, value = (constrain(x, names) for x in (query, key, value))
    return jax.shard_map(
        on_device,
        in_specs=(of_query, of_query, of_query, of_rows),
        out_specs=of_query,
        axis_names=manual,
        check_vma=False,
    )(query, key, value, constrain(rows, ("batch", None)))


def _on_device(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    *,
    sliding_window: int | None,
    packed: bool,
    interpret: bool,
) -> jax.Array:
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
    """The axes of the mesh that shard a model and are not manual already."""
    mesh = jax.sharding.get_abstract_mesh()
    ruled = {axis for axes in RULES.values() for axis in _names(axes)}
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if name in ruled and kind is not AxisType.Manual}


def _repeated(x: jax.Array, num_heads: int, axes: Any) -> jax.Array:
    """Repeats the heads of keys or values until the mesh, which shards heads, divides them."""
    sizes = jax.sharding.get_abstract_mesh().shape
    parts = math.prod(sizes[name] for name in _names(axes))
    times = parts // math.gcd(parts, x.shape[2])
    if num_heads % (x.shape[2] * times):
        times = num_heads // x.shape[2]
    # The queries of a head are neighbours, and so are its copies.
    return x if times == 1 else jnp.repeat(x, times, axis=2)


def _names(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
