"""The form of all reductions, and their common rules.

`finish(combine(terms(x[0]), ..., terms(x[n - 1])))` with an associative `combine`: the streaming
pass reduces chunk by chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fedpax.errors import ArgumentTypeError
from fedpax.primitives._jax import Primitive, Zero, define, is_zero, zero_tangent
from fedpax.primitives.layout import shard_over_placement, unplaced_aval
from fedpax.primitives.monoids import Monoid, reduce_terms
from fedpax.primitives.placement import ArrayTree, check_placed, resolve_placement


class Reduction(NamedTuple):
    """A reduction in three parts."""

    monoid: Monoid  # combines the terms of participants into totals
    # `(*operands) -> list of arrays`, one term for each operand. It works on the operands of all
    # participants and on one participant's operands.
    terms: Callable[..., list[jax.Array]]
    # `(totals, number of participants, dtype of the first operand) -> results`
    finish: Callable[[list[jax.Array], int, Any], list[jax.Array]]


REDUCTIONS: dict[Primitive, Reduction] = {}


def define_reduction(primitive: Primitive, reduction: Reduction, **rules: Callable) -> None:
    """Register a reduction and the rules of its primitive."""

    def reduce_all(x, *others):
        totals = reduce_terms(reduction.monoid, [x, *others], reduction.terms)
        return reduction.finish(totals, x.shape[0], x.dtype)

    def unwrap(results):
        return results if primitive.multiple_results else results[0]

    def abstract(x, *others, placement):
        # The shape is the operand's without its first axis; the dtypes are the reduction's.
        row = (jax.ShapeDtypeStruct((1,), a.dtype) for a in (x, *others))
        dtypes = [result.dtype for result in jax.eval_shape(reduce_all, *row)]
        out = unplaced_aval(x)
        return unwrap(
            [out.update(dtype=d, weak_type=x.weak_type and d == x.dtype) for d in dtypes]
        ), set()

    REDUCTIONS[primitive] = reduction
    define(
        primitive,
        abstract=abstract,
        implementation=lambda *args, placement: unwrap(reduce_all(*args)),
        **{"batch": _batch_rule(primitive)} | rules,
    )


def _batch_rule(primitive: Primitive) -> Callable:
    """Return a batching rule that moves the batch axis behind the placement's axis."""

    def batch(axis, args, dims, *, placement):
        x = jnp.moveaxis(args[0], dims[0], 1)
        out = primitive.bind(x, *args[1:], placement=placement)
        return out, [0] * len(out) if primitive.multiple_results else 0

    return batch


def reduce_tree(
    function: str, primitive: Primitive, x: ArrayTree, placement: str | None, *, ordered: bool
) -> ArrayTree:
    """Check a placed pytree and reduce each leaf; `ordered`: complex leaves raise."""
    target = resolve_placement(function, placement).placement
    leaves = check_placed(function, x, target, "x")
    check_numbers(function, x, ordered=ordered)
    reduced = [
        primitive.bind(shard_over_placement(leaf, target), placement=target) for leaf in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(x), reduced)


def check_numbers(function: str, x: ArrayTree, *, ordered: bool) -> None:
    """Raise a TypeError that names a leaf which cannot be reduced."""
    for path, leaf in jax.tree.leaves_with_path(x):
        dtype, where = jnp.result_type(leaf), "x" + jax.tree_util.keystr(path)
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise ArgumentTypeError(
                f"{function}(): {where} has dtype {dtype}, expected numbers: random keys cannot be "
                "reduced. Remove them from the pytree; of a flax model, "
                "nnx.split(model, nnx.Param, ...) gives the parameters alone."
            )
        if ordered and jnp.issubdtype(dtype, jnp.complexfloating):
            raise ArgumentTypeError(
                f"{function}(): {where} has dtype {dtype}, expected real numbers: complex numbers "
                "have no order. Pass their absolute values or real parts."
            )


def append_axes(w: jax.Array, x: jax.Array) -> jax.Array:
    """Append axes of size 1 to `w` until it broadcasts against the leading axes of `x`."""
    spec = jax.typeof(w).sharding.spec
    shape = (*w.shape, *[1] * (x.ndim - w.ndim))
    if all(s is None for s in spec):
        return w.reshape(shape)
    return jax.lax.reshape(w, shape, out_sharding=P(*spec, *[None] * (x.ndim - w.ndim)))


# ---- `federated_mask`: a mask that keeps the participants' axis first, for rules of derivatives

federated_mask_p = Primitive("federated_mask")
"""`where(mask, t, 0)` for each participant, linear in `t`.

`jnp.where` computes the same. Under `jax.vmap` it puts the batch axis in front of the participants'
axis, and there the streaming pass does not recognize a placed value.
"""


def apply_mask(mask: jax.Array, t: jax.Array) -> jax.Array:
    """Compute `where(mask, t, 0)`, for all participants or for one."""
    return jnp.where(mask, t, 0)


def _mask_jvp(primals, tangents, *, placement):
    (mask, t), (_, tangent) = primals, tangents
    out = federated_mask_p.bind(mask, t, placement=placement)
    if is_zero(tangent):
        return out, zero_tangent(out)
    return out, federated_mask_p.bind(mask, tangent, placement=placement)


def _mask_transpose(cotangent, mask, t, *, placement):
    if is_zero(cotangent):
        return [None, Zero(t.aval)]
    return [None, federated_mask_p.bind(mask, cotangent, placement=placement)]


def _mask_batch(axis, args, dims, *, placement):
    batch_second = [
        jnp.broadcast_to(jnp.expand_dims(a, 1), (a.shape[0], axis.size, *a.shape[1:]))
        if d is None
        else jnp.moveaxis(a, d, 1)
        for a, d in zip(args, dims, strict=True)
    ]
    return federated_mask_p.bind(*batch_second, placement=placement), 1


define(
    federated_mask_p,
    abstract=lambda mask, t, *, placement: (t, set()),
    implementation=lambda mask, t, *, placement: apply_mask(mask, t),
    jvp=_mask_jvp,
    transpose=_mask_transpose,
    batch=_mask_batch,
)
