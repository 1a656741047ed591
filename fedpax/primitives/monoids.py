"""Monoids: associative operations that combine the values of participants into totals."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.primitives.layout import spans_devices

ONE_BLOCK = 128  # participants; the rounding errors of so few additions are negligible


class Monoid(NamedTuple):
    """An associative operation with an identity."""

    reduce: Callable[[list], list]  # `(arrays [n, ...]) -> totals` over participants
    # `(totals, totals) -> totals` of two groups of participants
    merge: Callable[[list, list], list]
    identity: Callable[[list], list]  # `(dtypes) -> scalars`; merging with them changes nothing
    all_reduce: Callable[[list, str], list]  # `(totals, mesh axis) -> totals` over devices


def reduce_terms(
    monoid: Monoid, operands: Sequence[jax.Array], terms: Callable[..., list] | None = None
) -> list[jax.Array]:
    """Combine the terms of all participants into totals; by default the operands are the terms."""
    # On a CPU, participants are combined one after another: XLA's reduction over the leading axis
    # reads an array column by column. Blocks of participants keep rounding at the square root of
    # their number. Rows that are sharded over devices are reduced at once.
    make = terms or (lambda *own: list(own))

    def at_once(*operands: jax.Array) -> list[jax.Array]:
        return monoid.reduce(make(*operands))

    def one_by_one(*operands: jax.Array) -> list[jax.Array]:
        def terms_of(i: Any) -> list[jax.Array]:
            entries = [jax.lax.dynamic_index_in_dim(a, i, keepdims=False) for a in operands]
            return make(*entries)

        def combine(first: Any, count: int) -> list[jax.Array]:
            def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
                return monoid.merge(totals, terms_of(first + i))

            return jax.lax.fori_loop(1, count, step, terms_of(first))

        def add_block(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
            return monoid.merge(totals, combine(i * size, size))

        participants = len(operands[0])
        size = participants if participants <= ONE_BLOCK else math.isqrt(participants)
        blocks, rest = divmod(participants, size)
        totals = combine(0, size)
        if blocks > 1:
            totals = jax.lax.fori_loop(1, blocks, add_block, totals)
        return monoid.merge(totals, combine(blocks * size, rest)) if rest else totals

    if len(operands[0]) < 2 or spans_devices():
        return at_once(*operands)
    return jax.lax.platform_dependent(*operands, cpu=one_by_one, default=at_once)


def apply_by_monoid(
    monoids: Sequence[Monoid], apply: Callable[..., list], *totals: Sequence[Any]
) -> list[Any]:
    """Call `apply(monoid, *lists of its totals)` once for each different monoid."""
    combined: list[Any] = [None] * len(monoids)
    for monoid in dict.fromkeys(monoids):
        chosen = [i for i, m in enumerate(monoids) if m == monoid]
        results = apply(monoid, *([each[i] for i in chosen] for each in totals))
        for i, result in zip(chosen, results, strict=True):
            combined[i] = result
    return combined


def accumulation_dtype(dtype: Any) -> Any:
    """Return the dtype to accumulate in: float32 for narrower floats, else the dtype itself."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def whole_byte_dtype(dtype: Any) -> Any:
    """Return int8 or uint8 for integers of 2 and 4 bits, which `jnp.sum` refuses."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        dtype = jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    return jnp.dtype(dtype)


def weight_dtype(dtype: Any) -> Any:
    """Return the dtype in which weights of a dtype are added: float32, or a wider float."""
    return jnp.promote_types(accumulation_dtype(whole_byte_dtype(dtype)), jnp.float32)


def _lowest(dtype: Any) -> jax.Array:
    return jnp.asarray(_bounds(dtype)[0], dtype)


def _highest(dtype: Any) -> jax.Array:
    return jnp.asarray(_bounds(dtype)[1], dtype)


def _bounds(dtype: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest value; some 8-bit floats have no infinities."""
    if dtype == jnp.bool_:
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    if np.isinf(np.asarray(np.inf).astype(dtype)):
        return -np.inf, np.inf
    return jnp.finfo(dtype).min, jnp.finfo(dtype).max


def _elementwise(reduce: Callable, merge: Callable, identity: Callable, all_reduce: Any) -> Monoid:
    return Monoid(
        lambda arrays: reduce(arrays, axis=0),
        lambda some, others: list(map(merge, some, others)),
        functools.partial(_for_each_dtype, identity),
        all_reduce,
    )


def _for_each_dtype(identity: Callable, dtypes: Sequence[Any]) -> list[jax.Array]:
    identities = {dtype: identity(dtype) for dtype in dict.fromkeys(dtypes)}
    return [identities[dtype] for dtype in dtypes]


def _for_each(reduce: Callable) -> Callable:
    return lambda arrays, axis: [reduce(a, axis=axis) for a in arrays]


def _propagating_nan(extremum: Callable, nan_key: Callable) -> Callable:
    """Return an extremum that is NaN if any value is NaN, also between devices."""
    # XLA's all-reduce on CPU compares floats as C++ does and can drop a NaN. So floats are mapped
    # to integers of the same order, with one beyond all others, `nan_key(dtype)`, for NaN.

    def flip_negative(bits):
        # If the sign bit is set, larger bits are smaller numbers. Applied twice: the identity.
        return bits ^ (bits >> (8 * bits.dtype.itemsize - 1) & jnp.iinfo(bits.dtype).max)

    def key(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        wide = x.astype(accumulation_dtype(x.dtype))
        ints = jnp.int32 if wide.dtype.itemsize == 4 else jnp.int64
        bits = jax.lax.bitcast_convert_type(wide, ints)
        return jnp.where(jnp.isnan(wide), nan_key(ints), flip_negative(bits))

    def value(key, dtype):
        if not jnp.issubdtype(dtype, jnp.floating):
            return key
        wide = jax.lax.bitcast_convert_type(flip_negative(key), accumulation_dtype(dtype))
        return jnp.where(key == nan_key(key.dtype), jnp.nan, wide).astype(dtype)

    def run(arrays, axis):
        best = extremum(list(map(key, arrays)), axis)
        return [value(b, a.dtype) for b, a in zip(best, arrays, strict=True)]

    return run


ADDITION = _elementwise(
    # The terms have the dtype of the result already. By default NumPy widens integers again.
    lambda arrays, axis: [jnp.sum(a, axis=axis, dtype=a.dtype) for a in arrays],
    jax.lax.add,
    lambda dtype: jnp.zeros((), dtype),
    jax.lax.psum,
)
MAXIMUM = _elementwise(
    _propagating_nan(_for_each(jnp.max), _highest),
    jnp.maximum,
    _lowest,
    _propagating_nan(jax.lax.pmax, _highest),
)
MINIMUM = _elementwise(
    _propagating_nan(_for_each(jnp.min), _lowest),
    jnp.minimum,
    _highest,
    _propagating_nan(jax.lax.pmin, _lowest),
)


def equal_with_nan(x: jax.Array, y: jax.Array) -> jax.Array:
    """Compare elementwise for equality; NaN equals NaN."""
    return (x == y) | (jnp.isnan(x) & jnp.isnan(y))


def with_attained(extremum: Monoid, monoids: Sequence[Monoid]) -> Monoid:
    """Extend an extremum by other monoids' totals over the participants that attain it."""
    parts = (extremum, *monoids)

    def of_ties(best, x, *others):
        """Replace other totals by identities where `x` is not the overall extremum."""
        attained = equal_with_nan(x, best)
        identities = identity([x.dtype, *(a.dtype for a in others)])[1:]
        pairs = zip(others, identities, strict=True)
        return [jnp.where(attained, a, none) for a, none in pairs]

    def reduce(total):
        (best,) = extremum.reduce(total[:1])
        ties = of_ties(best, *total)
        return [best, *(m.reduce([a])[0] for m, a in zip(parts[1:], ties, strict=True))]

    def merge(total, other):
        (best,) = extremum.merge(total[:1], other[:1])
        ties = zip(parts[1:], of_ties(best, *total), of_ties(best, *other), strict=True)
        return [best, *(m.merge([a], [b])[0] for m, a, b in ties)]

    def identity(dtypes):
        return [m.identity([dtype])[0] for m, dtype in zip(parts, dtypes, strict=True)]

    def all_reduce(total, axis):
        (best,) = extremum.all_reduce(total[:1], axis)
        ties = of_ties(best, *total)
        return [best, *(m.all_reduce([a], axis)[0] for m, a in zip(parts[1:], ties, strict=True))]

    def for_each_total(fn: Callable) -> Callable:
        """Apply a function of one total, which is `parts` arrays, to a list of totals."""

        def run(*lists):
            starts = range(0, len(lists[0]), len(parts))
            return [x for i in starts for x in fn(*(own[i : i + len(parts)] for own in lists))]

        return run

    return Monoid(
        for_each_total(reduce),
        for_each_total(merge),
        for_each_total(identity),
        lambda totals, axis: for_each_total(functools.partial(all_reduce, axis=axis))(totals),
    )
