"""How values of many participants become one, a few at a time and then between devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Monoid(NamedTuple):
    """How values of many participants become totals, a few at a time.

    Its functions take lists: of some totals several arrays belong together.

    Attributes:
        reduce: `(arrays [n, ...]) -> totals`.
        merge: `(totals, totals) -> totals`.
        start: `(dtypes) -> ` the scalars that merging leaves as they are.
        collective: `(totals, axis_name) -> totals` between devices.
    """

    reduce: Callable[[list], list]
    merge: Callable[[list, list], list]
    start: Callable[[list], list]
    collective: Callable[[list, str], list]


def apply_by_monoid(
    monoids: Sequence[Monoid], apply: Callable[..., list], *totals: Sequence[Any]
) -> list[Any]:
    """Applies a function to the totals of each monoid, all of one together.

    Args:
        monoids: what each total is combined by.
        apply: `(monoid, *its totals) -> list` as long.
        *totals: lists as long as `monoids`.

    Returns:
        What it gives, in the order of the totals.
    """
    found: list[Any] = [None] * len(monoids)
    for monoid in dict.fromkeys(monoids):
        own = [i for i, m in enumerate(monoids) if m == monoid]
        results = apply(monoid, *([each[i] for i in own] for each in totals))
        for i, result in zip(own, results, strict=True):
            found[i] = result
    return found


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype to add up in: at least float32 for floats."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def _least(dtype: Any) -> jax.Array:
    return jnp.asarray(_bounds(dtype)[0], dtype)


def _greatest(dtype: Any) -> jax.Array:
    return jnp.asarray(_bounds(dtype)[1], dtype)


def _bounds(dtype: Any) -> tuple[Any, Any]:
    """The least and the greatest number; some floats of 8 bits have no infinities."""
    if dtype == jnp.bool_:
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    if np.isinf(np.asarray(np.inf).astype(dtype)):
        return -np.inf, np.inf
    return jnp.finfo(dtype).min, jnp.finfo(dtype).max


def _elementwise(reduce: Callable, merge: Callable, start: Callable, collective: Any) -> Monoid:
    return Monoid(
        lambda arrays: reduce(arrays, axis=0),
        lambda some, others: list(map(merge, some, others)),
        lambda dtypes: list(map(start, dtypes)),
        collective,
    )


def _listed(reduce: Callable) -> Callable:
    return lambda arrays, axis: [reduce(a, axis=axis) for a in arrays]


def _in_order(pick: Callable, nan: Callable) -> Callable:
    """A maximum or minimum that is NaN where any value is, between devices too.

    XLA's all-reduce on CPU compares as C++ does, and loses a NaN. Integers in the order of the
    floats, and one beyond them all for NaN, have no such case.

    Args:
        pick: `(arrays, axis) -> arrays`, the maximum or minimum.
        nan: `(integer dtype) -> ` what stands for NaN.

    Returns:
        A function like `pick`.
    """

    def turned(bits):
        # Where the sign is set, larger bits are smaller numbers. Turned twice they are as before.
        return bits ^ (bits >> (8 * bits.dtype.itemsize - 1) & jnp.iinfo(bits.dtype).max)

    def key(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        wide = x.astype(accumulation_dtype(x.dtype))
        ints = jnp.int32 if wide.dtype.itemsize == 4 else jnp.int64
        bits = jax.lax.bitcast_convert_type(wide, ints)
        return jnp.where(jnp.isnan(wide), nan(ints), turned(bits))

    def value(key, dtype):
        if not jnp.issubdtype(dtype, jnp.floating):
            return key
        wide = jax.lax.bitcast_convert_type(turned(key), accumulation_dtype(dtype))
        return jnp.where(key == nan(key.dtype), jnp.nan, wide).astype(dtype)

    def run(arrays, axis):
        best = pick(list(map(key, arrays)), axis)
        return [value(b, a.dtype) for b, a in zip(best, arrays, strict=True)]

    return run


ADDITION = _elementwise(_listed(jnp.sum), jnp.add, lambda dtype: jnp.zeros((), dtype), jax.lax.psum)
MAXIMUM = _elementwise(
    _in_order(_listed(jnp.max), _greatest),
    jnp.maximum,
    _least,
    _in_order(jax.lax.pmax, _greatest),
)
MINIMUM = _elementwise(
    _in_order(_listed(jnp.min), _least), jnp.minimum, _greatest, _in_order(jax.lax.pmin, _least)
)


def equal_with_nan(x: jax.Array, y: jax.Array) -> jax.Array:
    """Whether numbers are equal, NaN to itself too."""
    return (x == y) | (jnp.isnan(x) & jnp.isnan(y))


def with_ties(extremum: Monoid) -> Monoid:
    """An extremum; of those that attain it the first number, the last, and how many they are."""
    parts = (extremum, MINIMUM, MAXIMUM, ADDITION)

    def settle(best, x, *who):
        """A total's numbers and count, where `best` is the extremum of all."""
        own = equal_with_nan(x, best)
        nobody = start([x.dtype, *(a.dtype for a in who)])[1:]
        return [jnp.where(own, a, none) for a, none in zip(who, nobody, strict=True)]

    def reduce(total):
        (best,) = extremum.reduce(total[:1])
        who = settle(best, *total)
        return [best, *(m.reduce([a])[0] for m, a in zip(parts[1:], who, strict=True))]

    def merge(total, other):
        (best,) = extremum.merge(total[:1], other[:1])
        who = zip(parts[1:], settle(best, *total), settle(best, *other), strict=True)
        return [best, *(m.merge([a], [b])[0] for m, a, b in who)]

    def start(dtypes):
        return [m.start([dtype])[0] for m, dtype in zip(parts, dtypes, strict=True)]

    def collective(total, axis):
        (best,) = extremum.collective(total[:1], axis)
        who = settle(best, *total)
        return [best, *(m.collective([a], axis)[0] for m, a in zip(parts[1:], who, strict=True))]

    def each(fn: Callable) -> Callable:
        """The function for several totals, of four arrays each."""

        def run(*lists):
            starts = range(0, len(lists[0]), len(parts))
            return [x for i in starts for x in fn(*(own[i : i + len(parts)] for own in lists))]

        return run

    return Monoid(
        each(reduce),
        each(merge),
        each(start),
        lambda totals, axis: each(functools.partial(collective, axis=axis))(totals),
    )
