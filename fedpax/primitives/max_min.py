"""`federated_max` and `federated_min`, and their derivative.

The forward pass of a derivative returns which participants attain the extremum: a recomputed value
can round differently, and then equals the extremum of no participant.
"""

from __future__ import annotations

import functools
import operator
from typing import overload

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import Primitive, is_zero, zero_tangent
from fedpax.primitives.broadcast import broadcast, federated_index_p
from fedpax.primitives.monoids import (
    ADDITION,
    MAXIMUM,
    MINIMUM,
    equal_with_nan,
    with_attained,
)
from fedpax.primitives.placement import ArrayTree, Tree
from fedpax.primitives.reduction import (
    Reduction,
    append_axes,
    define_reduction,
    federated_mask_p,
    reduce_tree,
)
from fedpax.primitives.sum import federated_sum_p

federated_max_p = Primitive("federated_max")
"""The primitive of `federated_max`."""

federated_min_p = Primitive("federated_min")
"""The primitive of `federated_min`."""


@overload
def federated_max(x: jax.typing.ArrayLike, *, placement: str | None = None) -> jax.Array: ...
@overload
def federated_max(x: Tree, *, placement: str | None = None) -> Tree: ...
def federated_max(x: ArrayTree, *, placement: str | None = None) -> ArrayTree:
    """Take the elementwise maximum over participants: `out = max_i x[i]`.

    The result is NaN where a participant's value is NaN. The gradient is divided equally among the
    participants that attain the maximum, as in `jnp.max`. Of more than 128, it can miss
    some of three or more whose values are rounded again in the backward pass.

    Args:
        x: pytree of real arrays `[n, ...]`, placed.
        placement: name of the placement. Default None: the only placement of the program.

    Returns:
        The same pytree with leaves `[...]` of the same dtype.

    Raises:
        RuntimeError, ValueError: as in `federated_map`.
        TypeError: as in `federated_map`, or a leaf is complex.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> fedpax.program(clients=3)(fedpax.federated_max)(jnp.array([1.0, 4.0, 2.0])).item()
        4.0
    """
    return reduce_tree("federated_max", federated_max_p, x, placement, ordered=True)


@overload
def federated_min(x: jax.typing.ArrayLike, *, placement: str | None = None) -> jax.Array: ...
@overload
def federated_min(x: Tree, *, placement: str | None = None) -> Tree: ...
def federated_min(x: ArrayTree, *, placement: str | None = None) -> ArrayTree:
    """Take the elementwise minimum over participants: `out = min_i x[i]`.

    NaN and the gradient are as in `federated_max`.

    Args:
        x: pytree of real arrays `[n, ...]`, placed.
        placement: name of the placement. Default None: the only placement of the program.

    Returns:
        The same pytree with leaves `[...]` of the same dtype.

    Raises:
        RuntimeError, ValueError: as in `federated_map`.
        TypeError: as in `federated_map`, or a leaf is complex.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> fedpax.program(clients=3)(fedpax.federated_min)(jnp.array([4.0, 1.0, 2.0])).item()
        1.0
    """
    return reduce_tree("federated_min", federated_min_p, x, placement, ordered=True)


_WORD = 32  # bits
_MOST_BITS = 4 * _WORD


def _terms(x, *by_participant):
    return [x, *(append_axes(a, x) + jnp.zeros_like(x, a.dtype) for a in by_participant)]


def _jvp_with_set(with_set_p, primals, tangents, *, placement):
    index = federated_index_p.bind(placement=placement)
    bit = jnp.int32(1) << index % _WORD
    words = [jnp.where(index // _WORD == k, bit, 0) for k in range(_MOST_BITS // _WORD)]

    def ties_of(x, out, *attained):
        masks = zip(words, attained, strict=True)
        bits = [append_axes(w, x) & broadcast(a, placement) for w, a in masks]
        count = functools.reduce(operator.add, map(jax.lax.population_count, attained))
        return functools.reduce(operator.or_, bits) != 0, count

    return _jvp_of_ties(with_set_p, primals, tangents, words, ties_of, placement)


def _jvp_with_ties(with_ties_p, primals, tangents, *, placement):
    ones = broadcast(jnp.int32(1), placement)
    index = federated_index_p.bind(placement=placement)

    def ties_of(x, out, first, last, count):
        # Exact for one or two ties; of more, those between are found by comparing values.
        first, last, ties = (broadcast(a, placement) for a in (first, last, count))
        indices = append_axes(index, x)
        between = equal_with_nan(x, broadcast(out, placement)) & (ties > 2)
        return (indices == first) | (indices == last) | between, count

    return _jvp_of_ties(with_ties_p, primals, tangents, [index, index, ones], ties_of, placement)


def _jvp_of_ties(extended_p, primals, tangents, by_participant, ties_of, placement):
    """Divide the tangent among the ties; `ties_of` returns who they are, and their number."""
    x, t = primals[0], tangents[0]
    out, *attained = extended_p.bind(x, *by_participant, placement=placement)
    if is_zero(t):
        return [out, *attained], [zero_tangent(a) for a in (out, *attained)]
    is_tie, count = ties_of(x, out, *attained)
    share = federated_mask_p.bind(is_tie, t, placement=placement)
    tangent = federated_sum_p.bind(share, placement=placement) / count.astype(t.dtype)
    return [out, *attained], [tangent, *map(zero_tangent, attained)]


def _jvp(primitive, jvp_with_set, jvp_with_ties, primals, tangents, *, placement):
    if is_zero(tangents[0]):
        out = primitive.bind(*primals, placement=placement)
        return out, zero_tangent(out)
    jvp = jvp_with_set if placement.size <= _MOST_BITS else jvp_with_ties
    outs, tangents = jvp(primals, tangents, placement=placement)
    return outs[0], tangents[0]


_ATTAINED = {
    "set": (_jvp_with_set, [ADDITION] * (_MOST_BITS // _WORD)),
    "ties": (_jvp_with_ties, [MINIMUM, MAXIMUM, ADDITION]),
}
for _primitive, _monoid in ((federated_max_p, MAXIMUM), (federated_min_p, MINIMUM)):
    _jvps = []
    for _suffix, (_rule, _monoids) in _ATTAINED.items():
        _extended_p = Primitive(f"{_primitive.name}_with_{_suffix}")
        _extended_p.multiple_results = True
        _jvps.append(functools.partial(_rule, _extended_p))
        define_reduction(
            _extended_p,
            Reduction(with_attained(_monoid, _monoids), _terms, lambda totals, *_: totals),
            jvp=_jvps[-1],
        )
    define_reduction(
        _primitive,
        Reduction(_monoid, lambda x: [x], lambda totals, *_: totals),
        jvp=functools.partial(_jvp, _primitive, *_jvps),
    )
