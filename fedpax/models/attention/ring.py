"""Exact attention over a sequence that is cut over devices: keys and values go around a ring."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from fedpax.models.remat import ATTENTION
from fedpax.parallel.ring import Ring

# Tokens on other devices from which on a device saves more time by having half of them to see
# than it takes to exchange queries, keys, values and outputs: 2 (1 + num_kv_heads / num_heads) times
# the operations a chip computes for each byte that it sends, 4,000 to 5,000 on TPUs.
WORTH_BALANCING = 16_384


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    *,
    sliding_window: int | None = None,
    axis: str = "sequence",
    block: int = 512,
    balanced: bool | None = None,
) -> jax.Array:
    """Computes causal attention, with the sequence cut over a mesh axis.

    Each device keeps its queries, and in as many steps as there are devices it meets the keys and
    values of one device after another, which pass from neighbor to neighbor while it computes.
    Softmax is accumulated from block to block, in float32, so that no more than [tokens of a
    device, block] scores exist at once. The backward pass goes around once more: it keeps inputs,
    outputs and the softmax's logarithm, and recomputes the scores. With a window, keys go only
    as far as a query can see.

    Tokens see what stands before them, so with the sequence cut as it is the last device has work
    in each step, the first in one, and time is that of the last. `balanced`, each device computes
    with one of the first and one of the last of twice as many parts, exchanged on the way in and
    out: then all have the same work, half of the last one's.

    On a mesh without the axis, or with one device along it, the blocks are those of the device
    itself. Other axes of the mesh stay as they are. The axis must be automatic, and there are no
    forward-mode derivatives.

    Args:
      query: [batch, sequence, num_heads, head_dim], already rotated.
      key: [batch, sequence, num_kv_heads, head_dim], already rotated; head h of the queries
        uses head h // (num_heads / num_kv_heads).
      value: as key.
      segments: int32 [batch, sequence] or [1, sequence], which document of a packed sequence a
        token belongs to; a token sees its own document alone. One document by default.
      sliding_window: how many tokens a token sees, itself and those just before it; None for all.
      axis: the mesh axis that cuts the sequence.
      block: keys that are scored at once, at most; the largest divisor of a device's tokens that
        is not larger is taken.
      balanced: see above; by default where it pays, which is without a window and with at least
        16,384 tokens on the other devices.

    Returns:
      The shape and dtype of query.

    Raises:
      ValueError: the devices along the axis do not divide the sequence, the key's heads do not
        divide the query's, the axis is not automatic, or `balanced` is asked for with a window or
        an odd number of tokens on a device.

    Example:
      >>> from fedpax.models.attention.layer import attend, attention_mask
      >>> x = jax.random.normal(jax.random.key(0), (1, 6, 2, 4))
      >>> y = ring_attention(x, x, x, block=3)  # no mesh is set
      >>> bool(jnp.allclose(y, attend(x, x, x, attention_mask(6)), atol=1e-5))
      True

    Reference: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for
    Near-Infinite Context" (arXiv:2310.01889), section 3; Brandon et al., "Striped Attention"
    (arXiv:2311.09431), section 3, for the imbalance.
    """
    seq_len, heads, groups = query.shape[1], query.shape[2], key.shape[2]
    if heads % groups:
        raise ValueError(
            f"ring_attention: key has {groups} heads, which do not divide the {heads} of query: "
            "use a number of key and value heads that does."
        )
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    devices = mesh.shape[axis] if axis in kinds else 1
    if devices > 1 and kinds[axis] is not AxisType.Auto:
        raise ValueError(
            f"ring_attention: the mesh axis {axis!r} is {kinds[axis].name.lower()}, but it must be "
            f"automatic: make the mesh with axis_types={{{axis!r}: jax.sharding.AxisType.Auto}}, "
            "and call it outside of a shard_map over this axis."
        )
    if seq_len % devices:
        raise ValueError(
            f"ring_attention: the {devices} devices of the mesh axis {axis!r} do not divide a "
            f"sequence of {seq_len} tokens: pad it to {-(-seq_len // devices) * devices}."
        )
    tokens, window = seq_len // devices, min(sliding_window or seq_len, seq_len)
    can = devices > 1 and window == seq_len and tokens % 2 == 0
    if balanced and devices > 1 and not can:
        raise ValueError(
            f"ring_attention: balanced=True with sliding_window={window} and {tokens} tokens on a device: "
            "it needs all tokens visible and an even number on each device. Leave it out."
        )
    if balanced is None:
        balanced = seq_len - tokens >= WORTH_BALANCING
    ring = Ring(axis if devices > 1 else None, devices, tokens, window, balanced and can)
    return _attention(ring, block, query, key, value, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    ring: Ring, block: int, query: Any, key: Any, value: Any, segments: Any
) -> jax.Array:
    return _forward(ring, block, query, key, value, segments)[0]


def _forward(
    ring: Ring, block: int, query: Any, key: Any, value: Any, segments: Any
) -> tuple[jax.Array, tuple]:
    local = ring.run_on_devices(functools.partial(_local_forward, ring, block), num_outputs=2)
    # A policy of rematerialization that keeps attention keeps all that its derivative needs.
    out, logarithm = checkpoint_name(local(query, key, value, segments), ATTENTION)
    return out, (query, key, value, segments, out, logarithm)


def _backward(ring: Ring, block: int, kept: tuple, gradient: jax.Array) -> tuple:
    query, key, value, segments, out, logarithm = kept
    accurate = logarithm.dtype
    # What the derivative of softmax subtracts: sum over keys of weight times its derivative.
    mean = jnp.sum(gradient.astype(accurate) * out.astype(accurate), -1)
    local = ring.run_on_devices(functools.partial(_local_backward, ring, block), num_outputs=3)
    return (*local(query, key, value, segments, gradient, logarithm, mean), None)


_attention.defvjp(_forward, _backward)


class _Queries(NamedTuple):
    """What stays.

    Attributes:
      query: [batch, tokens, groups, heads of a group, head_dim].
      segments: [batch, tokens], or None.
      places: where in the sequence they are, [1, tokens].
    """

    query: jax.Array
    segments: jax.Array | None
    places: jax.Array


class _Keys(NamedTuple):
    """What goes around; places are found where they arrive.

    Attributes:
      key: [batch, tokens, groups, head_dim], as is `value`.
      value: see `key`.
      segments: [batch, tokens], or None.
      places: where in the sequence they are, [1, tokens].
    """

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None
    places: jax.Array


class _Softmax(NamedTuple):
    """The softmax of the keys that were met, times their values.

    Attributes:
      largest: the largest score of each query, [batch, groups, heads of a group, tokens].
      total: of the exponentials of scores relative to it, likewise.
      out: of these times values, likewise, with head_dim behind.
    """

    largest: jax.Array
    total: jax.Array
    out: jax.Array


def _local_forward(
    ring: Ring, block: int, query: Any, key: Any, value: Any, segments: Any
) -> tuple[jax.Array, jax.Array]:
    """A device's output, and the logarithm of the softmax's denominator [batch, tokens, heads]."""
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    low = jnp.finfo(accurate).min
    query, key, value, segments = ring.balance((query, key, value, segments))
    queries = _Queries(_grouped(query, key.shape[2]), segments, ring.positions(0))

    def meet(state: _Softmax, queries: _Queries, keys: _Keys) -> _Softmax:
        def one(state: _Softmax, keys: _Keys) -> tuple[_Softmax, None]:
            visible = _visible(ring, queries, keys)
            scores = jnp.where(visible, _scores(queries.query, keys.key), low)
            largest = jnp.maximum(state.largest, scores.max(-1))
            # Where nothing was visible yet, the largest score is no score: weights are 0, not 1.
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

        return jax.lax.scan(one, state, _blocks(keys, block))[0]

    def first(part: Any) -> _Softmax:
        rows = jnp.moveaxis(queries.query, 1, 3)
        state = _Softmax(
            jax.lax.full_like(rows[..., 0], low, accurate),
            jax.lax.full_like(rows[..., 0], 0, accurate),
            jax.lax.full_like(rows, 0, accurate),
        )
        return meet(state, queries, _keys(part, queries.places))

    def later(state: _Softmax, part: Any, step: Any) -> _Softmax:
        keys = _keys(part, ring.positions(step))

        def before() -> _Softmax:
            if not ring.balanced:
                return meet(state, queries, keys)
            return meet(state, queries, _half(keys, 0))

        def after() -> _Softmax:
            if not ring.balanced:
                return state
            late = meet(_half(state, 1, axis=3), _half(queries, 1), keys)
            return _join(_half(state, 0, axis=3), late, axis=3)

        return jax.lax.cond(ring.device_index >= step, before, after)

    state = ring.fold((key, value, segments), first, later)
    out = jnp.moveaxis(state.out / state.total[..., None], 3, 1).reshape(query.shape)
    logarithm = jnp.moveaxis(state.largest + jnp.log(state.total), 3, 1)
    logarithm = logarithm.reshape(query.shape[:-1])
    return ring.unbalance((out.astype(query.dtype), logarithm))


class _Rows(NamedTuple):
    """Queries, and what their derivatives need.

    Attributes:
      queries: the queries.
      gradient: with respect to their outputs, as their query.
      logarithm: of the softmax's denominator, [batch, tokens, groups, heads of a group].
      mean: of the derivative of the weights, likewise.
    """

    queries: _Queries
    gradient: jax.Array
    logarithm: jax.Array
    mean: jax.Array


def _local_backward(ring: Ring, block: int, *parts: Any) -> tuple:
    """A device's gradients with respect to query, key and value."""
    query, key, value, segments, gradient, logarithm, mean = ring.balance(parts)
    dtype, groups = query.dtype, key.shape[2]
    accurate = jnp.promote_types(dtype, jnp.float32)
    rows = _Rows(
        _Queries(_grouped(query, groups), segments, ring.positions(0)),
        *(_grouped(a, groups) for a in (gradient, logarithm, mean)),
    )
    multiply = functools.partial(jnp.einsum, preferred_element_type=accurate)

    def meet(to_query: jax.Array, rows: _Rows, keys: _Keys) -> tuple[jax.Array, list[jax.Array]]:
        logarithm, mean = (jnp.moveaxis(a, 1, 3)[..., None] for a in rows[2:])
        query = rows.queries.query

        def one(to_query: jax.Array, keys: _Keys) -> tuple[jax.Array, Any]:
            scores = _scores(query, keys.key) - logarithm
            weights = jnp.exp(jnp.where(_visible(ring, rows.queries, keys), scores, -jnp.inf))
            to_value = multiply("bkgts,btkgd->bskd", weights.astype(dtype), rows.gradient)
            to_weights = multiply("btkgd,bskd->bkgts", rows.gradient, keys.value)
            to_scores = weights * (to_weights - mean) * query.shape[-1] ** -0.5
            to_scores = to_scores.astype(dtype)
            to_query = to_query + multiply("bkgts,bskd->btkgd", to_scores, keys.key)
            return to_query, (multiply("bkgts,btkgd->bskd", to_scores, query), to_value)

        to_query, to_keys = jax.lax.scan(one, to_query, _blocks(keys, block))
        return to_query, [jnp.moveaxis(b, 0, 1).reshape(keys.key.shape) for b in to_keys]

    def first(part: Any) -> tuple[jax.Array, list[jax.Array]]:
        nothing = jax.lax.full_like(rows.queries.query, 0, accurate)
        return meet(nothing, rows, _keys(part, rows.queries.places))

    def later(state: tuple, part: Any, step: Any) -> tuple[jax.Array, list[jax.Array]]:
        to_query, to_keys = state
        # The gradients of these keys come from the device that had them in the step before.
        arriving = ring.send(to_keys)
        keys = _keys(part, ring.positions(step))
        none = [jax.lax.full_like(a, 0, accurate) for a in part[:2]]

        def before() -> tuple[jax.Array, list[jax.Array]]:
            if not ring.balanced:
                return meet(to_query, rows, keys)
            summed, early = meet(to_query, rows, _half(keys, 0))
            return summed, _join(early, _half(none, 1))

        def after() -> tuple[jax.Array, list[jax.Array]]:
            if not ring.balanced:
                return to_query, none
            late, more = meet(_half(to_query, 1), _half(rows, 1), keys)
            return _join(_half(to_query, 0), late), more

        to_query, more = jax.lax.cond(ring.device_index >= step, before, after)
        return to_query, [a + b for a, b in zip(arriving, more, strict=True)]

    to_query, to_keys = ring.fold((key, value, segments), first, later)
    to_keys = ring.send(to_keys, 1 - ring.num_steps) if ring.num_steps > 1 else to_keys  # home
    gradients = [a.astype(dtype) for a in (to_query.reshape(query.shape), *to_keys)]
    return tuple(ring.unbalance(gradients))


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """[batch, tokens, heads, ...] as [batch, tokens, groups, heads of a group, ...]."""
    return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])


def _keys(part: Any, places: jax.Array) -> _Keys:
    key, value, segments = part
    return _Keys(key, value, segments, places)


def _blocks(keys: _Keys, size: int) -> _Keys:
    """Keys in blocks of at most so many tokens, to scan over."""
    tokens = keys.key.shape[1]
    size = next(size for size in range(min(size, tokens), 0, -1) if tokens % size == 0)
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, size, *a.shape[2:]), 1, 0), keys
    )


def _half(tree: Any, which: int, axis: int = 1) -> Any:
    return jax.tree.map(lambda a: jnp.split(a, 2, axis)[which], tree)


def _join(early: Any, late: Any, axis: int = 1) -> Any:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis), early, late)


def _visible(ring: Ring, queries: _Queries, keys: _Keys) -> jax.Array:
    """Which keys each query sees: boolean [batch, 1, 1, queries, keys]."""
    distance = queries.places[:, :, None] - keys.places[:, None, :]
    visible = (distance >= 0) & (distance < ring.window)
    if queries.segments is not None and keys.segments is not None:
        visible &= queries.segments[:, :, None] == keys.segments[:, None, :]
    return visible[:, None, None]


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """[batch, groups, heads of a group, queries, keys], float32 at least."""
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=accurate)
    return scores * query.shape[-1] ** -0.5
