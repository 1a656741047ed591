"""`federated_sum`, which is the transpose of `federated_broadcast`."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import Primitive, Zero, is_zero, set_transpose, zero_tangent
from fedpax.primitives.broadcast import broadcast, federated_broadcast_p
from fedpax.primitives.integer_sums import collect
from fedpax.primitives.monoids import ADDITION, accumulation_dtype, whole_byte_dtype
from fedpax.primitives.placement import ArrayTree, Tree
from fedpax.primitives.reduction import Reduction, define_reduction, reduce_tree

federated_sum_p = Primitive("federated_sum")
"""The primitive of `federated_sum`."""


@overload
def federated_sum(x: jax.typing.ArrayLike, *, placement: str | None = None) -> jax.Array: ...
@overload
def federated_sum(x: Tree, *, placement: str | None = None) -> Tree: ...
def federated_sum(x: ArrayTree, *, placement: str | None = None) -> ArrayTree:
    """Sum over participants: `out = sum_i x[i]`.

    Args:
        x: pytree of arrays `[n, ...]`, placed.
        placement: name of the placement. Default None: the only placement of the program.

    Returns:
        The same pytree with leaves `[...]`. The dtype follows `jnp.sum`: int32 for smaller
        integers. float16 and bfloat16 are accumulated in float32 and rounded once. Inside `jax.jit`
        a sum of signed integers beyond its dtype wraps around, as with `jnp.sum`. Unsigned integers
        are always summed modulo 2^32 (or 2^64).

    Raises:
        RuntimeError, TypeError: as in `federated_map`.
        ValueError: as in `federated_map`; or, outside of `jax.jit`, a sum of signed integers is
            beyond its dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> fedpax.program(clients=3)(fedpax.federated_sum)(jnp.array([1.0, 2.0, 4.0])).item()
        7.0
    """

    def add(x: ArrayTree) -> ArrayTree:
        return reduce_tree("federated_sum", federated_sum_p, x, placement, ordered=False)

    totals = add(x)
    collect(x, totals, add)
    return totals


def _sum_dtype(dtype: Any) -> Any:
    wide = accumulation_dtype(whole_byte_dtype(dtype))
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((1,), wide)).dtype


def _finish(totals, participants, dtype):
    (total,) = totals
    return [total.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total]


def _jvp(primals, tangents, *, placement):
    (x,), (t,) = primals, tangents
    out = federated_sum_p.bind(x, placement=placement)
    if is_zero(t):
        return out, zero_tangent(out)
    return out, federated_sum_p.bind(t, placement=placement)


def _transpose(cotangent, x, *, placement):
    return [Zero(x.aval) if is_zero(cotangent) else broadcast(cotangent, placement)]


define_reduction(
    federated_sum_p,
    Reduction(ADDITION, lambda x: [x.astype(_sum_dtype(x.dtype))], _finish),
    jvp=_jvp,
    transpose=_transpose,
)


def _transpose_of_broadcast(cotangent, x, *, placement, closed_over=False):
    if is_zero(cotangent):
        return [Zero(x.aval)]
    return [federated_sum_p.bind(cotangent, placement=placement)]


# Registered here and not beside the broadcast, so that broadcast.py need not import this module.
set_transpose(federated_broadcast_p, _transpose_of_broadcast)
