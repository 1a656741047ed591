"""`federated_mean`: the plain and the weighted mean over participants."""

from __future__ import annotations

import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives._jax import Primitive, Zero, define, is_zero, zero_tangent
from fedpax.primitives.broadcast import broadcast
from fedpax.primitives.casts import device_weights, is_host_number
from fedpax.primitives.integer_sums import check_weights, collect_means, collect_weights
from fedpax.primitives.layout import shard_over_placement
from fedpax.primitives.monoids import ADDITION, accumulation_dtype, whole_byte_dtype
from fedpax.primitives.placement import (
    ArrayTree,
    Placement,
    Tree,
    check_array,
    check_placed,
    resolve_placement,
)
from fedpax.primitives.reduction import (
    Reduction,
    append_axes,
    check_numbers,
    define_reduction,
    federated_mask_p,
    reduce_tree,
)
from fedpax.primitives.sum import federated_sum_p

federated_mean_p = Primitive("federated_mean")
"""The primitive of `federated_mean`."""

participant_count_p = Primitive("participant_count")
"""float32: the number of participants, a constant unless some of them can be absent."""

define(
    participant_count_p,
    abstract=lambda *, placement: (jax.core.ShapedArray((), jnp.dtype(jnp.float32)), set()),
    implementation=lambda *, placement: jnp.float32(placement.size),
)


@overload
def federated_mean(
    x: jax.typing.ArrayLike,
    weights: jax.typing.ArrayLike | None = None,
    *,
    placement: str | None = None,
) -> jax.Array: ...
@overload
def federated_mean(
    x: Tree, weights: jax.typing.ArrayLike | None = None, *, placement: str | None = None
) -> Tree: ...
def federated_mean(
    x: ArrayTree, weights: jax.typing.ArrayLike | None = None, *, placement: str | None = None
) -> ArrayTree:
    """Average over participants: `out = sum_i w[i] x[i] / sum_i w[i]`.

    A participant of weight 0 is absent: its value has no effect, also if it is NaN or infinite, and
    then the derivative with respect to its weight is 0. If the weights sum to zero, the mean is 0.
    A NaN weight gives NaN. Negative weights are used as given.

    The weights are added up in float32 (float64 for float64 values). Outside of `jax.jit`, a sum
    above 3.4e38, or below 1.2e-38 and not 0, raises, and so does a mean whose products `w[i] x[i]`
    are out of range. Inside, a sum above the range gives NaN, and weights and products below it
    count as 0.

    Args:
        x: pytree of arrays `[n, ...]`, placed.
        weights: array `[n]` of any real dtype, for example numbers of examples. Default None: equal
            weights.
        placement: name of the placement. Default None: the only placement of the program.

    Returns:
        The same pytree with leaves `[...]`. The dtype follows `jnp.mean`: floats keep
        their dtype (accumulated in float32 or wider) and integers become float32.

    Raises:
        RuntimeError: called outside a program.
        TypeError: as in `federated_map`, or the weights are complex.
        ValueError: as in `federated_map`, the weights do not have shape `[n]`, or their sum or
            products are known and out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=3)
        ... def average(x, num_examples):
        ...     return fedpax.federated_mean(x, weights=num_examples)
        >>> average(jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 1, 2])).item()
        2.75

    Reference:
        McMahan et al., arXiv:1602.05629, algorithm 1.
    """
    if weights is None:
        return reduce_tree("federated_mean", federated_mean_p, x, placement, ordered=False)
    target = resolve_placement("federated_mean", placement).placement
    w = shard_over_placement(_check_weights(weights, target), target)
    collect_weights(w)
    leaves = check_placed("federated_mean", x, target, "x")
    check_numbers("federated_mean", x, ordered=False)

    def average(leaf: jax.Array, w: jax.Array) -> jax.Array:
        return federated_mean_p.bind(shard_over_placement(leaf, target), w, placement=target)

    means = [average(leaf, w) for leaf in leaves]
    collect_means(x, means, w, average)
    return jax.tree.unflatten(jax.tree.structure(x), means)


def _check_weights(weights: Any, placement: Placement) -> jax.Array:
    if is_host_number(weights):
        weights = device_weights(weights, "federated_mean(): weights")
    leaves = [
        check_array("federated_mean()", leaf, "weights" + jax.tree_util.keystr(path))
        for path, leaf in jax.tree.leaves_with_path(weights)
    ]
    if len(leaves) != 1 or jnp.shape(leaves[0]) != (placement.size,):
        shapes = [jnp.shape(leaf) for leaf in leaves]
        if isinstance(weights, list | tuple) and not any(shapes):
            raise ArgumentError(
                f"federated_mean(): weights is a {type(weights).__name__} of {len(weights)} "
                f"numbers, expected an array of shape ({placement.size},). Pass jnp.array(weights)."
            )
        raise ArgumentError(
            f"federated_mean(): weights has shape {shapes[0] if len(shapes) == 1 else shapes}, "
            f"expected ({placement.size},), one number for each of the {placement.name}. If "
            "weights differ between parameters, multiply inside federated_map() and divide one "
            "federated_sum() by another."
        )
    (w,) = check_placed("federated_mean", leaves[0], placement, "weights")
    if jnp.issubdtype(w.dtype, jnp.complexfloating):
        raise ArgumentTypeError(
            f"federated_mean(): weights has dtype {w.dtype}, expected real numbers, for example "
            "numbers of examples. Pass weights.real."
        )
    if not isinstance(w, jax.core.Tracer) and w.is_fully_addressable:
        known = np.abs(np.asarray(w, np.float64))
        if np.all(np.isfinite(known)):
            check_weights(float(known.sum()), int(np.count_nonzero(known)), jnp.float32)
    return w


def count_participants(placement: Placement) -> jax.Array:
    """Return the number of participants: a constant, or those that answer in `fedpax.stages`."""
    return participant_count_p.bind(placement=placement)


# ---- rules; `weights` has any number of the leading axes of `x`, so that weights can be batched


@functools.cache  # rounds have thousands of leaves
def _mean_dtype(dtype: Any) -> Any:
    return jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((1,), whole_byte_dtype(dtype))).dtype


def _divide(total, weight):
    """Return `total / weight`, and 0 where the weight is 0."""
    empty = weight == 0
    return jnp.where(empty, 0, total / jnp.where(empty, 1, weight))


def _terms(x, *weights):
    dtype = accumulation_dtype(_mean_dtype(x.dtype))
    if not weights:
        return [x.astype(dtype)]
    w = weights[0].astype(jnp.finfo(dtype).dtype)  # real, also for complex values
    return [_weighted(x, w, dtype), w]


@functools.partial(jax.jit, static_argnums=2)  # traced and lowered once for the leaves of a shape
def _weighted(x, w, dtype):
    factor = append_axes(w, x).astype(dtype)
    # 0 * NaN is NaN: an absent participant, whose data are padding, would make the mean NaN.
    return jnp.where(factor == 0, 0, factor * x.astype(dtype))


def _finish(totals, participants, dtype):
    total, *weight = totals
    if weight:
        mean = _divide(total, append_axes(weight[0], total).astype(total.dtype))
        overflow = append_axes(jnp.isinf(weight[0]), mean)  # otherwise x / infinity is 0
        mean = jnp.where(overflow, jnp.nan, mean)
    else:
        # For one participant there is no division, not even by 1: it would block XLA's sharding
        # propagation, and the program of one island must equal the program without islands.
        count = np.asarray(participants, total.dtype)
        mean = jax.lax.div(total, count) if participants > 1 else total
    return [mean.astype(_mean_dtype(dtype))]


def _jvp(primals, tangents, *, placement):
    x, *weights = primals
    t, *weight_tangents = tangents
    out = federated_mean_p.bind(x, *weights, placement=placement)
    terms = [] if is_zero(t) else [federated_mean_p.bind(t, *weights, placement=placement)]
    if weight_tangents and not is_zero(weight_tangents[0]):
        # d/dw of (sum w x) / (sum w) = (sum dw (x - mean)) / (sum w).
        (w,), (tw,) = weights, weight_tangents
        wide = accumulation_dtype(out.dtype)
        deviation = x.astype(wide) - broadcast(out.astype(wide), placement)
        has_effect = (append_axes(w, deviation) != 0) | jnp.isfinite(deviation)
        deviation = federated_mask_p.bind(has_effect, deviation, placement=placement)
        change = federated_sum_p.bind(
            append_axes(tw.astype(wide), deviation) * deviation, placement=placement
        )
        weight = federated_sum_p.bind(w.astype(wide), placement=placement)
        terms.append(_divide(change, append_axes(weight, change)).astype(out.dtype))
    return out, sum(terms[1:], terms[0]) if terms else zero_tangent(out)


def _transpose(cotangent, x, *weights, placement):
    none = [None] * len(weights)
    if is_zero(cotangent):
        return [Zero(x.aval), *none]
    wide = cotangent.astype(accumulation_dtype(cotangent.dtype))
    if not weights:
        count = count_participants(placement).astype(wide.dtype)
        return [broadcast((wide / count).astype(cotangent.dtype), placement)]
    w = weights[0].astype(wide.dtype)
    weight = federated_sum_p.bind(w, placement=placement)
    share = broadcast(_divide(wide, append_axes(weight, wide)), placement)
    return [(append_axes(w, share) * share).astype(cotangent.dtype), *none]


def _batch(axis, args, dims, *, placement):
    def batch_second(arg, dim):
        if dim is not None:
            return jnp.moveaxis(arg, dim, 1)
        return jnp.repeat(jnp.expand_dims(arg, 1), axis.size, axis=1)

    x, *weights = args
    if weights and dims[1] is None and weights[0].ndim == 1:
        return federated_mean_p.bind(jnp.moveaxis(x, dims[0], 1), *weights, placement=placement), 0
    moved = [batch_second(a, d) for a, d in zip(args, dims, strict=True)]
    return federated_mean_p.bind(*moved, placement=placement), 0


define_reduction(
    federated_mean_p,
    Reduction(ADDITION, _terms, _finish),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
