"""Sums beyond the range of their dtype: found where a program runs outside of `jax.jit`."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.errors import ArgumentError
from fedpax.primitives._jax import get_opaque_trace_state
from fedpax.primitives.monoids import weight_dtype

WEIGHTS = "weights"


class IntegerSum(NamedTuple):
    """A sum of signed integers, or of weights, over participants; or a weighted mean."""

    where: str  # the summed leaf, for the message
    total: Any  # the sum in its integer dtype; of weights, in floats; or the mean
    # the sum in floats; of weights, the number of those but 0; or the mean with scaled weights
    estimate: Any


class _Collected(NamedTuple):
    """The trace whose sums are collected, the sums, and whether weighted means are too."""

    trace: Any
    sums: list[IntegerSum]
    means: bool


_collected: ContextVar[_Collected | None] = ContextVar("collected", default=None)

# With sums of weights between 2**-40 and 2**40, products with values of 1e-26 to 1e26 are in range.
USUAL_EXPONENTS = 40


def is_eager(values: Sequence[Any]) -> bool:
    """Return whether code that takes these values runs now, and is not traced."""
    # Under jax.jit, every array is traced, also one that depends on no argument.
    return not any(isinstance(x, jax.core.Tracer) for x in (*values, jnp.zeros(())))


@contextmanager
def collect_sums(wanted: bool, means: bool = False) -> Iterator[list[IntegerSum]]:
    """Collect the sums of the code within the context, but not of functions that it traces."""
    sums: list[IntegerSum] = []
    token = _collected.set(_Collected(get_opaque_trace_state(), sums, means) if wanted else None)
    try:
        yield sums
    finally:
        _collected.reset(token)


def _current() -> _Collected | None:
    """Return where the sums of the current trace are collected, if they are."""
    collected = _collected.get()
    if collected is None or collected.trace != get_opaque_trace_state():
        return None
    return collected


def collect(x: Any, totals: Any, add: Callable[[jax.Array], jax.Array]) -> None:
    """Add the sums of a pytree's signed integers to those that are collected."""
    collected = _current()
    if collected is None:
        return
    for (path, leaf), total in zip(
        jax.tree.leaves_with_path(x), jax.tree.leaves(totals), strict=True
    ):
        if jnp.issubdtype(total.dtype, jnp.signedinteger):
            where = f"x{jax.tree_util.keystr(path)}"
            collected.sums.append(IntegerSum(where, total, add(leaf.astype(jnp.float32))))


def collect_weights(weights: jax.Array) -> None:
    """Add the sum of weights to the sums that are collected, and the number of weights but 0."""
    collected = _current()
    if collected is None:
        return
    wide = weights.astype(weight_dtype(weights.dtype))
    # By its bits but the sign: a processor may read the smallest numbers as 0.
    bits = jax.lax.bitcast_convert_type(wide, f"uint{8 * wide.dtype.itemsize}")
    collected.sums.append(IntegerSum(WEIGHTS, jnp.sum(jnp.abs(wide)), jnp.sum(bits << 1 != 0)))


def collect_means(
    x: Any, means: Sequence[jax.Array], weights: jax.Array, average: Callable[..., jax.Array]
) -> None:
    """Add weighted means to the collected ones, beside the means with scaled weights."""
    collected = _current()
    if collected is None or not collected.means:
        return
    # A power of 2 changes no digit of a mean whose products stay in the range.
    wide = weights.astype(weight_dtype(weights.dtype))
    most = -int(jnp.finfo(wide.dtype).minexp)
    _, exponent = jnp.frexp(jnp.sum(jnp.abs(wide)))
    scaled = jnp.ldexp(wide, jnp.clip(-exponent, -most, most))
    for (path, leaf), mean in zip(jax.tree.leaves_with_path(x), means, strict=True):
        where = f"x{jax.tree_util.keystr(path)}"
        collected.sums.append(IntegerSum(where, mean, average(leaf, scaled)))


def has_unusual_weights(sums: Sequence[IntegerSum]) -> bool:
    """Return whether products of weights and usual values can be out of the range of floats."""
    for where, total, _ in sums:
        if where == WEIGHTS and _is_known(total):
            exponent = math.frexp(float(total))[1]
            if abs(exponent) > USUAL_EXPONENTS:
                return True
    return False


def check_weights(
    total: float, count: int, dtype: Any, where: str = "federated_mean(): weights has"
) -> None:
    """Raise a ValueError if a sum of weights is out of the range of its dtype."""
    least, most = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max)
    if total > most or (count and total < least):
        # A processor may add up the smallest numbers as 0.
        given = f"the sum {total:g}" if total else f"a sum below {least:.1e}"
        raise ArgumentError(
            f"{where} {given}, expected 0 or {least:.1e} to "
            f"{most:.1e}, the range of {jnp.dtype(dtype)}. Divide the weights by their largest one."
        )


def _check_mean(where: str, mean: np.ndarray, scaled: np.ndarray) -> None:
    """Raise a ValueError if products of weights and values were out of the range of floats."""
    computed, expected = np.asarray(mean, np.complex128), np.asarray(scaled, np.complex128)
    size = np.abs(expected)
    largest = np.max(size, initial=0.0, where=np.isfinite(size))
    # Values that are tiny beside the largest one may underflow: rounding loses as much.
    differs = np.isfinite(size) & ~(np.abs(computed - expected) <= 1e-6 * largest)
    if np.any(differs):
        raise ArgumentError(
            f"federated_mean(): the weighted mean of {where} is {mean[differs].flat[0]:g}, "
            f"expected {scaled[differs].flat[0]:g}: products of weights and values are out of the "
            f"range of {jnp.finfo(mean.dtype).dtype}. Divide the weights by their largest one."
        )


def _is_known(total: Any) -> bool:
    # Other processes can have parts of it.
    return not isinstance(total, jax.core.Tracer) and (
        total.is_fully_addressable or total.is_fully_replicated
    )


def check_sums(sums: Sequence[IntegerSum]) -> None:
    """Raise a ValueError for a sum that differs from its estimate by a multiple of its range."""
    for where, total, estimate in sums:
        if not _is_known(total):
            continue
        if where == WEIGHTS:
            check_weights(float(total), int(estimate), total.dtype)
            continue
        if jnp.issubdtype(total.dtype, jnp.inexact):
            _check_mean(where, np.asarray(total), np.asarray(estimate))
            continue
        bounds = np.iinfo(total.dtype)
        close = np.asarray(estimate, np.float64)
        wrapped = np.abs(close - np.asarray(total, np.float64)) > bounds.max
        if np.any(wrapped):
            raise ArgumentError(
                f"federated_sum(): the sum of {where} is {close[wrapped].flat[0]:g}, expected at "
                f"most {bounds.max} and at least {bounds.min} ({total.dtype}). Sum floats: "
                "federated_sum(x.astype(jnp.float32)). Inside jax.jit this sum would wrap around."
            )
