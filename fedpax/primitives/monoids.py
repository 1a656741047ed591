"""How values of many participants become one, a few at a time and then between devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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


def combine(
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


def accumulator(dtype: Any) -> Any:
    """The dtype to add up in: at least float32 for floats."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def _least(dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return jnp.zeros((), dtype)
    least = jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else -jnp.inf
    return jnp.asarray(least, dtype)


def _greatest(dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return jnp.ones((), dtype)
    greatest = jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.inf
    return jnp.asarray(greatest, dtype)


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
        wide = x.astype(accumulator(x.dtype))
        ints = jnp.int32 if wide.dtype.itemsize == 4 else jnp.int64
        bits = jax.lax.bitcast_convert_type(wide, ints)
        return jnp.where(jnp.isnan(wide), nan(ints), turned(bits))

    def value(key, dtype):
        if not jnp.issubdtype(dtype, jnp.floating):
            return key
        wide = jax.lax.bitcast_convert_type(turned(key), accumulator(dtype))
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


def is_same(x: jax.Array, y: jax.Array) -> jax.Array:
    """Whether numbers are equal, NaN to itself too."""
    return (x == y) | (jnp.isnan(x) & jnp.isnan(y))


def with_who(extremum: Monoid) -> Monoid:
    """An extremum, the least number of those that attain it, and how many they are."""

    def settle(best, x, number, count):
        """A total's number and count, where `best` is the extremum of all."""
        own = is_same(x, best)
        return jnp.where(own, number, _greatest(number.dtype)), jnp.where(own, count, 0)

    def reduce(total):
        (best,) = extremum.reduce(total[:1])
        number, count = settle(best, *total)
        return [best, jnp.min(number, axis=0), jnp.sum(count, axis=0, dtype=count.dtype)]

    def merge(total, other):
        (best,) = extremum.merge(total[:1], other[:1])
        (number, count), (number_, count_) = settle(best, *total), settle(best, *other)
        return [best, jnp.minimum(number, number_), count + count_]

    def start(dtypes):
        return [*extremum.start(dtypes[:1]), _greatest(dtypes[1]), jnp.zeros((), dtypes[2])]

    def collective(total, axis):
        (best,) = extremum.collective(total[:1], axis)
        number, count = settle(best, *total)
        return [best, jax.lax.pmin(number, axis), jax.lax.psum(count, axis)]

    def each(fn: Callable) -> Callable:
        """The function for several totals, of three arrays each."""

        def run(*lists):
            starts = range(0, len(lists[0]), 3)
            return [x for i in starts for x in fn(*(entries[i : i + 3] for entries in lists))]

        return run

    return Monoid(
        each(reduce),
        each(merge),
        each(start),
        lambda totals, axis: each(functools.partial(collective, axis=axis))(totals),
    )
