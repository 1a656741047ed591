"""`federated_sum`, `federated_mean`, `federated_max`, `federated_min`: participants to server."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import Primitive, Zero, define, is_zero, zero_tangent
from fedpax.primitives.broadcast import broadcast, federated_index_p
from fedpax.primitives.layout import lay_out, unplaced_aval
from fedpax.primitives.monoids import (
    ADDITION,
    MAXIMUM,
    MINIMUM,
    Monoid,
    accumulator,
    is_same,
    with_who,
)
from fedpax.primitives.placement import Placement, check_array, check_placed, resolve

federated_sum_p = Primitive("federated_sum")
federated_mean_p = Primitive("federated_mean")
federated_max_p = Primitive("federated_max")
federated_min_p = Primitive("federated_min")


def federated_sum(x: Any, *, placement: str | None = None) -> Any:
    """Sums over the participants: `out = sum_i x[i]`.

    Args:
        x: a pytree of arrays `[n, ...]`, placed.
        placement: the placement's name; needed where the program has several.

    Returns:
        The same pytree with leaves `[...]`. Dtypes are those of `jnp.sum`; float16 and bfloat16 are
        summed in float32 and rounded once.

    Raises:
        RuntimeError: outside of a program.
        TypeError: a leaf that is no array and no number.
        ValueError: a leaf without the placement's axis, an unknown placement, or none named where
            there are several.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> fedpax.program(clients=3)(fedpax.federated_sum)(jnp.array([1.0, 2.0, 4.0])).item()
        7.0
    """
    return _reduce_tree("federated_sum", federated_sum_p, x, placement)


def federated_mean(x: Any, weights: Any = None, *, placement: str | None = None) -> Any:
    """Averages over the participants: `out = sum_i w[i] x[i] / sum_i w[i]`.

    Weights that sum to zero give 0, not NaN: a round in which nobody has an example changes
    nothing. A NaN among the weights gives NaN, and negative weights are taken as they are.

    Args:
        x: a pytree of arrays `[n, ...]`, placed.
        weights: an array `[n]` of any real dtype, for example numbers of examples; None weighs all
            participants alike.
        placement: the placement's name; needed where the program has several.

    Returns:
        The same pytree with leaves `[...]`. Dtypes are those of `jnp.mean`: a float stays what it
        is (accumulated in float32 or wider), an integer becomes float32.

    Raises:
        RuntimeError: outside of a program.
        TypeError: a leaf that is no array and no number; complex weights.
        ValueError: a leaf without the placement's axis, weights of another shape than `[n]`, an
            unknown placement, or none named where there are several.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=3)
        ... def average(x, num_examples):
        ...     return fedpax.federated_mean(x, weights=num_examples)
        >>> average(jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 1, 2])).item()
        2.75

    Reference:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
        arXiv:1602.05629, algorithm 1.
    """
    if weights is None:
        return _reduce_tree("federated_mean", federated_mean_p, x, placement)
    target = resolve("federated_mean", placement).placement
    w = lay_out(_check_weights(weights, target), target)
    leaves = check_placed("federated_mean", x, target, "x")
    _check_numbers("federated_mean", x, ordered=False)
    means = [federated_mean_p.bind(lay_out(leaf, target), w, placement=target) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(x), means)


def federated_max(x: Any, *, placement: str | None = None) -> Any:
    """Takes the elementwise maximum over the participants: `out = max_i x[i]`.

    NaN where anyone's is. The derivative goes to the participants that attain the maximum, in equal
    parts, as in `jnp.max`.

    Args:
        x: a pytree of real arrays `[n, ...]`, placed.
        placement: the placement's name; needed where the program has several.

    Returns:
        The same pytree with leaves `[...]` of the same dtype.

    Raises:
        RuntimeError: outside of a program.
        TypeError: a leaf that is no array and no number.
        ValueError: a leaf without the placement's axis, an unknown placement, or none named where
            there are several.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> fedpax.program(clients=3)(fedpax.federated_max)(jnp.array([1.0, 4.0, 2.0])).item()
        4.0
    """
    return _reduce_tree("federated_max", federated_max_p, x, placement)


def federated_min(x: Any, *, placement: str | None = None) -> Any:
    """Takes the elementwise minimum over the participants: `out = min_i x[i]`.

    NaN where anyone's is. The derivative goes to the participants that attain the minimum, in equal
    parts, as in `jnp.min`.

    Args:
        x: a pytree of real arrays `[n, ...]`, placed.
        placement: the placement's name; needed where the program has several.

    Returns:
        The same pytree with leaves `[...]` of the same dtype.

    Raises:
        RuntimeError: outside of a program.
        TypeError: a leaf that is no array and no number.
        ValueError: a leaf without the placement's axis, an unknown placement, or none named where
            there are several.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> fedpax.program(clients=3)(fedpax.federated_min)(jnp.array([4.0, 1.0, 2.0])).item()
        1.0
    """
    return _reduce_tree("federated_min", federated_min_p, x, placement)


def _reduce_tree(function: str, primitive: Primitive, x: Any, name: str | None) -> Any:
    target = resolve(function, name).placement
    leaves = check_placed(function, x, target, "x")
    _check_numbers(function, x, ordered=primitive in (federated_max_p, federated_min_p))
    reduced = [primitive.bind(lay_out(leaf, target), placement=target) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(x), reduced)


def _check_numbers(function: str, x: Any, *, ordered: bool) -> None:
    for path, leaf in jax.tree.leaves_with_path(x):
        dtype, where = jnp.result_type(leaf), "x" + jax.tree_util.keystr(path)
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise TypeError(
                f"{function}(): {where} has dtype {dtype}, expected numbers: random keys cannot be "
                "reduced. Take them out of the tree."
            )
        if ordered and jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(
                f"{function}(): {where} has dtype {dtype}, but complex numbers have no order; "
                "expected real numbers. Pass their absolute values or real parts."
            )


def _check_weights(weights: Any, placement: Placement) -> jax.Array:
    leaves = [
        check_array("federated_mean", leaf, "weights" + jax.tree_util.keystr(path))
        for path, leaf in jax.tree.leaves_with_path(weights)
    ]
    if len(leaves) != 1 or jnp.shape(leaves[0]) != (placement.size,):
        found = [jnp.shape(leaf) for leaf in leaves]
        raise ValueError(
            f"federated_mean(): weights has shape {found[0] if len(found) == 1 else found}, "
            f"expected ({placement.size},), one number for each of the {placement.name}. For "
            "weights that differ by parameter, multiply inside federated_map() and divide one "
            "federated_sum() by another."
        )
    (w,) = check_placed("federated_mean", leaves[0], placement, "weights")
    if jnp.issubdtype(w.dtype, jnp.complexfloating):
        raise TypeError(
            f"federated_mean(): weights has dtype {w.dtype}, expected real numbers, such as "
            "numbers of examples. Pass weights.real."
        )
    return w


class Reduction(NamedTuple):
    """A reduction in parts, so that participants can be reduced as they come.

    Attributes:
        monoid: what its terms are combined by.
        terms: `(*operands) -> ` as many terms, of all participants or of one.
        finish: `(totals, participants, dtype of the first operand) -> results`.
    """

    monoid: Monoid
    terms: Callable[..., list[jax.Array]]
    finish: Callable[[list[jax.Array], int, Any], list[jax.Array]]


REDUCTIONS: dict[Primitive, Reduction] = {}


def _define_reduction(primitive: Primitive, reduction: Reduction, **rules: Callable) -> None:
    def whole(x, *others):
        totals = reduction.monoid.reduce(reduction.terms(x, *others))
        return reduction.finish(totals, x.shape[0], x.dtype)

    def unwrapped(results):
        return results if primitive.multiple_results else results[0]

    def abstract(x, *others, placement):
        """The types are the placed one less its first axis, with the dtypes that come out."""
        one = (jax.ShapeDtypeStruct((1,), a.dtype) for a in (x, *others))
        dtypes = [result.dtype for result in jax.eval_shape(whole, *one)]
        out = unplaced_aval(x)
        return unwrapped(
            [out.update(dtype=d, weak_type=x.weak_type and d == x.dtype) for d in dtypes]
        ), set()

    REDUCTIONS[primitive] = reduction
    define(
        primitive,
        abstract=abstract,
        implementation=lambda *args, placement: unwrapped(whole(*args)),
        **{"batch": _batch_in_front(primitive)} | rules,
    )


def _batch_in_front(primitive: Primitive) -> Callable:
    """The batch axis moves behind the placement's axis, which is reduced away."""

    def batch(axis, args, dims, *, placement):
        x = jnp.moveaxis(args[0], dims[0], 1)
        out = primitive.bind(x, *args[1:], placement=placement)
        return out, [0] * len(out) if primitive.multiple_results else 0

    return batch


# ---- sum


def _sum_dtype(dtype: Any) -> Any:
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((1,), accumulator(dtype))).dtype


def _sum_finish(totals, participants, dtype):
    (total,) = totals
    return [total.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total]


def _sum_jvp(primals, tangents, *, placement):
    (x,), (t,) = primals, tangents
    out = federated_sum_p.bind(x, placement=placement)
    if is_zero(t):
        return out, zero_tangent(out)
    return out, federated_sum_p.bind(t, placement=placement)


def _sum_transpose(cotangent, x, *, placement):
    return [Zero(x.aval) if is_zero(cotangent) else broadcast(cotangent, placement)]


_define_reduction(
    federated_sum_p,
    Reduction(ADDITION, lambda x: [x.astype(_sum_dtype(x.dtype))], _sum_finish),
    jvp=_sum_jvp,
    transpose=_sum_transpose,
)


# ---- mean: `weights` may have any number of the leading axes of `x`, so that it can be batched


def _mean_dtype(dtype: Any) -> Any:
    return jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((1,), dtype)).dtype


def _expand(w, x):
    """Weights, with axes appended until they broadcast against `x`."""
    spec = jax.typeof(w).sharding.spec
    shape = (*w.shape, *[1] * (x.ndim - w.ndim))
    if all(s is None for s in spec):
        return w.reshape(shape)
    return jax.lax.reshape(w, shape, out_sharding=P(*spec, *[None] * (x.ndim - w.ndim)))


def _divide(total, weight):
    """`total / weight`, and 0 where the weight is 0."""
    empty = weight == 0
    return jnp.where(empty, 0, total / jnp.where(empty, 1, weight))


def _mean_terms(x, *weights):
    wide = x.astype(accumulator(_mean_dtype(x.dtype)))
    if not weights:
        return [wide]
    w = weights[0].astype(wide.dtype)
    return [_expand(w, wide) * wide, w]


def _mean_finish(totals, participants, dtype):
    total, *weight = totals
    if weight:
        mean = _divide(total, _expand(weight[0], total))
    else:
        # A division by 1 would stand in the way of sharding propagation, and so change how the
        # compiler cuts the program around it: one island must be the program without islands.
        mean = total / participants if participants > 1 else total
    return [mean.astype(_mean_dtype(dtype))]


def _mean_jvp(primals, tangents, *, placement):
    x, *weights = primals
    t, *weight_tangents = tangents
    out = federated_mean_p.bind(x, *weights, placement=placement)
    terms = [] if is_zero(t) else [federated_mean_p.bind(t, *weights, placement=placement)]
    if weight_tangents and not is_zero(weight_tangents[0]):
        # d/dw of (sum w x) / (sum w) = (sum dw (x - mean)) / (sum w).
        (w,), (tw,) = weights, weight_tangents
        wide = accumulator(out.dtype)
        apart = x.astype(wide) - broadcast(out.astype(wide), placement)
        change = federated_sum_p.bind(_expand(tw.astype(wide), apart) * apart, placement=placement)
        weight = federated_sum_p.bind(w.astype(wide), placement=placement)
        terms.append(_divide(change, _expand(weight, change)).astype(out.dtype))
    return out, sum(terms[1:], terms[0]) if terms else zero_tangent(out)


def _mean_transpose(cotangent, x, *weights, placement):
    none = [None] * len(weights)
    if is_zero(cotangent):
        return [Zero(x.aval), *none]
    wide = cotangent.astype(accumulator(cotangent.dtype))
    if not weights:
        return [broadcast((wide / placement.size).astype(cotangent.dtype), placement)]
    w = weights[0].astype(wide.dtype)
    weight = federated_sum_p.bind(w, placement=placement)
    share = broadcast(_divide(wide, _expand(weight, wide)), placement)
    return [(_expand(w, share) * share).astype(cotangent.dtype), *none]


def _mean_batch(axis, args, dims, *, placement):
    def in_second_place(arg, dim):
        if dim is not None:
            return jnp.moveaxis(arg, dim, 1)
        return jnp.repeat(jnp.expand_dims(arg, 1), axis.size, axis=1)

    x, *weights = args
    if weights and dims[1] is None and weights[0].ndim == 1:
        return federated_mean_p.bind(jnp.moveaxis(x, dims[0], 1), *weights, placement=placement), 0
    moved = [in_second_place(a, d) for a, d in zip(args, dims, strict=True)]
    return federated_mean_p.bind(*moved, placement=placement), 0


_define_reduction(
    federated_mean_p,
    Reduction(ADDITION, _mean_terms, _mean_finish),
    jvp=_mean_jvp,
    transpose=_mean_transpose,
    batch=_mean_batch,
)


# ---- max and min


federated_choice_p = Primitive("federated_choice")
"""`where(mask, t, 0)`, for each participant; linear in t.

`jnp.where` would do, but under `jax.vmap` it puts the batch axis before that of the participants,
where the streaming pass does not look for it.
"""


def choose(mask: jax.Array, t: jax.Array) -> jax.Array:
    """What `federated_choice_p` computes, of all participants or of one."""
    return jnp.where(mask, t, 0)


def _choice_jvp(primals, tangents, *, placement):
    (mask, t), (_, tangent) = primals, tangents
    out = federated_choice_p.bind(mask, t, placement=placement)
    if is_zero(tangent):
        return out, zero_tangent(out)
    return out, federated_choice_p.bind(mask, tangent, placement=placement)


def _choice_transpose(cotangent, mask, t, *, placement):
    if is_zero(cotangent):
        return [None, Zero(t.aval)]
    return [None, federated_choice_p.bind(mask, cotangent, placement=placement)]


def _choice_batch(axis, args, dims, *, placement):
    in_second_place = [
        jnp.broadcast_to(jnp.expand_dims(a, 1), (a.shape[0], axis.size, *a.shape[1:]))
        if d is None
        else jnp.moveaxis(a, d, 1)
        for a, d in zip(args, dims, strict=True)
    ]
    return federated_choice_p.bind(*in_second_place, placement=placement), 1


define(
    federated_choice_p,
    abstract=lambda mask, t, *, placement: (t, set()),
    implementation=lambda mask, t, *, placement: choose(mask, t),
    jvp=_choice_jvp,
    transpose=_choice_transpose,
    batch=_choice_batch,
)


def _extremum_terms(x, *of_who):
    return [x, *(_expand(a, x) + jnp.zeros_like(x, a.dtype) for a in of_who)]


def _extremum_jvp(who, primals, tangents, *, placement):
    x, t = primals[0], tangents[0]
    ones = broadcast(jnp.int32(1), placement)
    numbers = federated_index_p.bind(placement=placement)
    out, *known = who.bind(x, numbers, numbers, ones, placement=placement)
    if is_zero(t):
        return [out, *known], [zero_tangent(a) for a in (out, *known)]
    # Where x is computed again it may be rounded otherwise, and nobody's be equal to the maximum:
    # so the first who attained it is known by number, and the last. Only those between two are
    # found by comparing.
    first, last, ties = (broadcast(a, placement) for a in known)
    number = _expand(numbers, x)
    between = is_same(x, broadcast(out, placement)) & (ties > 2)
    chosen = federated_choice_p.bind(
        (number == first) | (number == last) | between, t, placement=placement
    )
    total = federated_sum_p.bind(chosen, placement=placement)
    return [out, *known], [total / known[-1].astype(t.dtype), *map(zero_tangent, known)]


def _extremum_alone_jvp(primitive, who, primals, tangents, *, placement):
    if is_zero(tangents[0]):
        out = primitive.bind(*primals, placement=placement)
        return out, zero_tangent(out)
    outs, tangents = _extremum_jvp(who, primals, tangents, placement=placement)
    return outs[0], tangents[0]


for _primitive, _monoid in ((federated_max_p, MAXIMUM), (federated_min_p, MINIMUM)):
    _who = Primitive(f"{_primitive.name}_with_who")
    _who.multiple_results = True
    _jvp = functools.partial(_extremum_jvp, _who)
    _whole = Reduction(with_who(_monoid), _extremum_terms, lambda totals, *_: totals)
    _define_reduction(_who, _whole, jvp=_jvp)
    _define_reduction(
        _primitive,
        Reduction(_monoid, lambda x: [x], lambda totals, *_: totals),
        jvp=functools.partial(_extremum_alone_jvp, _primitive, _who),
    )
