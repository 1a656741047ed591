"""Ring attention: exact attention over a sequence that is sharded over devices."""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from fedpax.errors import ArgumentError
from fedpax.ops.remat import ATTENTION
from fedpax.parallel.ring import Ring

Tree = TypeVar("Tree", bound=chex.ArrayTree)
_Shard: TypeAlias = tuple[jax.Array, jax.Array, jax.Array | None]  # key, value, segments

# Least number of tokens on other devices for which balancing is faster by default: it skips half of
# their scores and exchanges queries, keys, values and outputs. It wins above 2 (1 + num_kv_heads /
# num_heads) times a chip's operations per byte sent, which are 4,000 to 5,000 on TPUs.
MIN_TOKENS_TO_BALANCE = 16_384


def ring_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "#batch seq"] | None = None,
    *,
    sliding_window: int | None = None,
    axis: str = "sequence",
    block: int = 512,
    balanced: bool | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute causal attention over a sequence that is sharded over a mesh axis.

    Each device keeps its queries. Keys and values pass from neighbor to neighbor around the ring,
    in n steps, or with a sliding window only as far as a query can attend. Softmax accumulates
    block by block in float32, and a device stores at most [tokens per device, block] scores per
    head. The backward pass goes around the ring once more and recomputes the scores.

    With a contiguous causal split the last device has work in every step and the first in one. With
    `balanced`, each device computes on one early and one late part of 2 n parts instead.

    Without the axis, this is blockwise attention on each device. The axis must be automatic. There
    is no forward-mode derivative.

    Args:
        query: `[batch, seq_len, num_heads, head_dim]`, already rotated.
        key: `[batch, seq_len, num_kv_heads, head_dim]`, already rotated. Query head h uses key
            head h // (num_heads / num_kv_heads).
        value: as `key`.
        segments: int32 `[batch, seq_len]` or `[1, seq_len]`, the document of each token in a packed
            sequence. Default None: one document per row.
        sliding_window: number of tokens that a token attends to, itself included. Default None: all
            earlier tokens.
        axis: the mesh axis that shards the sequence.
        block: maximum number of keys whose scores exist at once.
        balanced: whether to balance the work. Default None: without a sliding window, if the other
            devices hold at least 16,384 tokens.

    Returns:
        The shape and dtype of `query`.

    Raises:
        ValueError: the devices along the axis do not divide the sequence, num_kv_heads does not
            divide num_heads, the axis is not automatic, or `balanced=True` with a sliding window
            or with an odd number of tokens per device.

    Example:
        >>> from fedpax.models.attention.causal import attention_mask, masked_attention
        >>> x = jax.random.normal(jax.random.key(0), (1, 6, 2, 4))
        >>> y = ring_attention(x, x, x, block=3)  # no mesh is set
        >>> bool(jnp.allclose(y, masked_attention(x, x, x, attention_mask(6)), atol=1e-5))
        True

    Reference:
        Liu, Zaharia and Abbeel, arXiv:2310.01889, section 3; Brandon et al., arXiv:2311.09431,
        section 3, for the imbalance.
    """
    seq_len, heads, groups = query.shape[1], query.shape[2], key.shape[2]
    if heads % groups:
        raise ArgumentError(
            f"ring_attention: key has {groups} heads, which do not divide the {heads} heads of "
            "query. Use a divisor."
        )
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    devices = mesh.shape[axis] if axis in kinds else 1
    if devices > 1 and kinds[axis] is not AxisType.Auto:
        raise ArgumentError(
            f"ring_attention: the mesh axis {axis!r} is {kinds[axis].name.lower()}, expected "
            f"automatic. Make the mesh with axis_types={{{axis!r}: jax.sharding.AxisType.Auto}}, "
            "and call ring_attention outside of a shard_map over this axis."
        )
    if seq_len % devices:
        raise ArgumentError(
            f"ring_attention: the {devices} devices of the mesh axis {axis!r} do not divide a "
            f"sequence of {seq_len} tokens. Pad it to {-(-seq_len // devices) * devices}."
        )
    tokens, window = seq_len // devices, min(sliding_window or seq_len, seq_len)
    can = devices > 1 and window == seq_len and tokens % 2 == 0
    if balanced and devices > 1 and not can:
        raise ArgumentError(
            f"ring_attention: balanced=True with sliding_window={window} and {tokens} tokens per "
            f"device: it needs a window of all {seq_len} tokens and an even number of tokens per "
            "device. Leave `balanced` out."
        )
    if balanced is None:
        balanced = seq_len - tokens >= MIN_TOKENS_TO_BALANCE
    ring = Ring(axis if devices > 1 else None, devices, tokens, window, balanced and can)
    return _attention(ring, block, query, key, value, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    ring: Ring,
    block: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    return _forward(ring, block, query, key, value, segments)[0]


def _forward(ring: Ring, block: int, *shards: jax.Array | None) -> tuple[jax.Array, tuple]:
    local = ring.run_on_devices(functools.partial(_forward_on_device, ring, block), num_outputs=2)
    # A remat policy that saves attention saves all that its derivative needs.
    out, logarithm = checkpoint_name(local(*shards), ATTENTION)
    return out, (*shards, out, logarithm)


def _backward(ring: Ring, block: int, residuals: tuple, gradient: jax.Array) -> tuple:
    query, key, value, segments, out, logarithm = residuals
    accurate = logarithm.dtype
    # The derivative of softmax subtracts: the sum over keys of weight times its cotangent.
    mean = jnp.sum(gradient.astype(accurate) * out.astype(accurate), -1)
    local = ring.run_on_devices(functools.partial(_backward_on_device, ring, block), num_outputs=3)
    return (*local(query, key, value, segments, gradient, logarithm, mean), None)


_attention.defvjp(_forward, _backward)


class _Queries(NamedTuple):
    """Queries of a device; they stay there."""

    query: jax.Array  # `[batch, tokens, groups, heads per group, head_dim]`
    segments: jax.Array | None  # `[batch, tokens]`, or None
    positions: jax.Array  # positions in the sequence, `[1, tokens]`


class _Keys(NamedTuple):
    """Keys and values, which go around the ring; each device computes their positions."""

    key: jax.Array  # `[batch, tokens, groups, head_dim]`
    value: jax.Array  # `[batch, tokens, groups, head_dim]`
    segments: jax.Array | None  # `[batch, tokens]`, or None
    positions: jax.Array  # positions in the sequence, `[1, tokens]`


class _Softmax(NamedTuple):
    """Running softmax over the keys seen so far, times their values."""

    largest: jax.Array  # largest score of each query, `[batch, groups, heads per group, tokens]`
    total: jax.Array  # sum of exp(score - largest), same shape
    out: jax.Array  # sum of exp(score - largest) value, with head_dim behind


def _forward_on_device(
    ring: Ring, block: int, *shards: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return a device's output and log softmax denominators [batch, tokens, heads]."""
    query, key, value, segments = ring.balance(shards)
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    low = jnp.finfo(accurate).min
    queries = _Queries(_grouped(query, key.shape[2]), segments, ring.positions(0))

    def attend(state: _Softmax, queries: _Queries, keys: _Keys) -> _Softmax:
        def attend_block(state: _Softmax, keys: _Keys) -> tuple[_Softmax, None]:
            visible = _visible(ring, queries, keys)
            scores = jnp.where(visible, _scores(queries.query, keys.key), low)
            largest = jnp.maximum(state.largest, scores.max(-1))
            # While a query has seen no visible key, `largest` is -max and exp(0) would be 1.
            weights = jnp.where(visible, jnp.exp(scores - largest[..., None]), 0)
            shrink = jnp.exp(state.largest - largest)
            out = jnp.einsum(
                "bkgts,bskd->bkgtd",
                weights.astype(query.dtype),
                keys.value,
                preferred_element_type=accurate,
            )
            total = state.total * shrink + weights.sum(-1)
            return _Softmax(largest, total, state.out * shrink[..., None] + out), None

        return jax.lax.scan(attend_block, state, _blocks(keys, block))[0]

    def first(shard: _Shard) -> _Softmax:
        rows = jnp.moveaxis(queries.query, 1, 3)
        state = _Softmax(
            jax.lax.full_like(rows[..., 0], low, accurate),
            jax.lax.full_like(rows[..., 0], 0, accurate),
            jax.lax.full_like(rows, 0, accurate),
        )
        return attend(state, queries, _keys(shard, queries.positions))

    def later(state: _Softmax, shard: _Shard, step: int | jax.Array) -> _Softmax:
        keys = _keys(shard, ring.positions(step))

        def before() -> _Softmax:
            if not ring.balanced:
                return attend(state, queries, keys)
            return attend(state, queries, _half(keys, 0))

        def after() -> _Softmax:
            if not ring.balanced:
                return state
            late = attend(_half(state, 1, axis=3), _half(queries, 1), keys)
            return _join(_half(state, 0, axis=3), late, axis=3)

        return jax.lax.cond(ring.device_index >= step, before, after)

    state = ring.fold((key, value, segments), first, later)
    out = jnp.moveaxis(state.out / state.total[..., None], 3, 1).reshape(query.shape)
    logarithm = jnp.moveaxis(state.largest + jnp.log(state.total), 3, 1)
    logarithm = logarithm.reshape(query.shape[:-1])
    return ring.unbalance((out.astype(query.dtype), logarithm))


class _Rows(NamedTuple):
    """Queries and the values that their derivatives need."""

    queries: _Queries
    gradient: jax.Array  # gradient with respect to their outputs, of the shape of `queries.query`
    # Log of the softmax denominator, `[batch, tokens, groups, heads per group]`.
    logarithm: jax.Array
    mean: jax.Array  # weighted mean of the weights' cotangents, same shape


def _backward_on_device(ring: Ring, block: int, *shards: jax.Array | None) -> tuple[jax.Array, ...]:
    """Return a device's gradients with respect to query, key and value."""
    query, key, value, segments, gradient, logarithm, mean = ring.balance(shards)
    dtype, groups = query.dtype, key.shape[2]
    accurate = jnp.promote_types(dtype, jnp.float32)
    rows = _Rows(
        _Queries(_grouped(query, groups), segments, ring.positions(0)),
        *(_grouped(a, groups) for a in (gradient, logarithm, mean)),
    )
    multiply = functools.partial(jnp.einsum, preferred_element_type=accurate)

    def attend(d_query: jax.Array, rows: _Rows, keys: _Keys) -> tuple[jax.Array, list[jax.Array]]:
        logarithm, mean = (jnp.moveaxis(a, 1, 3)[..., None] for a in rows[2:])
        query = rows.queries.query

        def attend_block(
            d_query: jax.Array, keys: _Keys
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            scores = _scores(query, keys.key) - logarithm
            weights = jnp.exp(jnp.where(_visible(ring, rows.queries, keys), scores, -jnp.inf))
            d_value = multiply("bkgts,btkgd->bskd", weights.astype(dtype), rows.gradient)
            d_weights = multiply("btkgd,bskd->bkgts", rows.gradient, keys.value)
            d_scores = weights * (d_weights - mean) * query.shape[-1] ** -0.5
            d_scores = d_scores.astype(dtype)
            d_query = d_query + multiply("bkgts,bskd->btkgd", d_scores, keys.key)
            return d_query, (multiply("bkgts,btkgd->bskd", d_scores, query), d_value)

        d_query, d_keys = jax.lax.scan(attend_block, d_query, _blocks(keys, block))
        return d_query, [jnp.moveaxis(b, 0, 1).reshape(keys.key.shape) for b in d_keys]

    def first(shard: _Shard) -> tuple[jax.Array, list[jax.Array]]:
        zeros = jax.lax.full_like(rows.queries.query, 0, accurate)
        return attend(zeros, rows, _keys(shard, rows.queries.positions))

    def later(
        state: tuple[jax.Array, list[jax.Array]], shard: _Shard, step: int | jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        d_query, d_keys = state
        # Gradients travel with their keys: from the device that had them in the previous step.
        arriving = ring.send(d_keys)
        keys = _keys(shard, ring.positions(step))
        zeros = [jax.lax.full_like(a, 0, accurate) for a in shard[:2]]

        def before() -> tuple[jax.Array, list[jax.Array]]:
            if not ring.balanced:
                return attend(d_query, rows, keys)
            summed, early = attend(d_query, rows, _half(keys, 0))
            return summed, _join(early, _half(zeros, 1))

        def after() -> tuple[jax.Array, list[jax.Array]]:
            if not ring.balanced:
                return d_query, zeros
            late, more = attend(_half(d_query, 1), _half(rows, 1), keys)
            return _join(_half(d_query, 0), late), more

        d_query, more = jax.lax.cond(ring.device_index >= step, before, after)
        return d_query, [a + b for a, b in zip(arriving, more, strict=True)]

    d_query, d_keys = ring.fold((key, value, segments), first, later)
    d_keys = (
        ring.send(d_keys, 1 - ring.num_steps) if ring.num_steps > 1 else d_keys
    )  # back to the owner
    gradients = [a.astype(dtype) for a in (d_query.reshape(query.shape), *d_keys)]
    return tuple(ring.unbalance(gradients))


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """Reshape [batch, tokens, heads, ...] to [batch, tokens, groups, heads per group, ...]."""
    return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])


def _keys(shard: _Shard, positions: jax.Array) -> _Keys:
    key, value, segments = shard
    return _Keys(key, value, segments, positions)


def _blocks(keys: _Keys, size: int) -> _Keys:
    """Split keys into blocks of at most `size` tokens, to scan over."""
    tokens = keys.key.shape[1]
    size = next(size for size in range(min(size, tokens), 0, -1) if tokens % size == 0)
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, size, *a.shape[2:]), 1, 0), keys
    )


def _half(tree: Tree, which: int, axis: int = 1) -> Tree:
    return jax.tree.map(lambda a: jnp.split(a, 2, axis)[which], tree)


def _join(early: Tree, late: Tree, axis: int = 1) -> Tree:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis), early, late)


def _visible(ring: Ring, queries: _Queries, keys: _Keys) -> jax.Array:
    """Make the mask of visible keys: boolean [batch, 1, 1, queries, keys]."""
    distance = queries.positions[:, :, None] - keys.positions[:, None, :]
    visible = (distance >= 0) & (distance < ring.window)
    if queries.segments is not None and keys.segments is not None:
        visible &= queries.segments[:, :, None] == keys.segments[:, None, :]
    return visible[:, None, None]


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Compute scores [batch, groups, heads per group, queries, keys], float32 at least."""
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=accurate)
    return scores * query.shape[-1] ** -0.5
