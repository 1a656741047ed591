"""Integer sums that overflow: found where a program runs outside of `jax.jit`.

Inside `jax.jit` a value cannot raise, so a sum beyond its dtype wraps around, as with `jnp.sum`.
"""

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


class IntegerSum(NamedTuple):
    """A sum of signed integers, or of weights, over participants.

    Attributes:
        where: the summed leaf, for the message.
        total: the sum in its integer dtype; of weights, in floats.
        estimate: the sum in floats, of the same shape; of weights, the number of those but 0.
    """

    where: str
    total: Any
    estimate: Any


# The trace whose sums are collected, and the sums.
_collected: ContextVar[tuple[Any, list[IntegerSum]] | None] = ContextVar("collected", default=None)


def is_eager(values: Sequence[Any]) -> bool:
    """Return whether code that takes these values runs now, and is not traced."""
    # Under jax.jit, every array is traced, also one that depends on no argument.
    return not any(isinstance(x, jax.core.Tracer) for x in (*values, jnp.zeros(())))


@contextmanager
def collect_sums(wanted: bool) -> Iterator[list[IntegerSum]]:
    """Collect the sums of the code within the context, but not of functions that it traces."""
    sums: list[IntegerSum] = []
    token = _collected.set((get_opaque_trace_state(), sums) if wanted else None)
    try:
        yield sums
    finally:
        _collected.reset(token)


def collect(x: Any, totals: Any, add: Callable[[jax.Array], jax.Array]) -> None:
    """Add the sums of a pytree's signed integers to those that are collected.

    Args:
        x: the summed pytree.
        totals: its sums.
        add: sums an array over the participants.
    """
    collected = _collected.get()
    if collected is None or collected[0] != get_opaque_trace_state():
        return
    for (path, leaf), total in zip(
        jax.tree.leaves_with_path(x), jax.tree.leaves(totals), strict=True
    ):
        if jnp.issubdtype(total.dtype, jnp.signedinteger):
            where = f"x{jax.tree_util.keystr(path)}"
            collected[1].append(IntegerSum(where, total, add(leaf.astype(jnp.float32))))


def collect_weights(weights: jax.Array) -> None:
    """Add the sum of weights to the sums that are collected, and the number of weights but 0."""
    collected = _collected.get()
    if collected is None or collected[0] != get_opaque_trace_state():
        return
    wide = weights.astype(weight_dtype(weights.dtype))
    # By its bits but the sign: a processor may read the smallest numbers as 0.
    bits = jax.lax.bitcast_convert_type(wide, f"uint{8 * wide.dtype.itemsize}")
    collected[1].append(IntegerSum("weights", jnp.sum(jnp.abs(wide)), jnp.sum(bits << 1 != 0)))


def check_weights(total: float, count: int, dtype: Any) -> None:
    """Raise a ValueError if a sum of weights is out of the range of its dtype.

    Args:
        total: the sum of the weights' absolute values.
        count: the number of weights that are not 0.
        dtype: a float dtype.
    """
    least, most = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max)
    if total > most or (count and total < least):
        raise ArgumentError(
            f"federated_mean(): weights has the sum {total:g}, expected 0 or {least:.1e} to "
            f"{most:.1e}, the range of {jnp.dtype(dtype)}. Divide the weights by their largest one."
        )


def check_sums(sums: Sequence[IntegerSum]) -> None:
    """Raise a ValueError if a sum has wrapped around, or one of weights is out of range.

    It then differs from the estimate by a multiple of 2**32, or of 2**64 in 64 bits.
    """
    for where, total, estimate in sums:
        if isinstance(total, jax.core.Tracer):
            continue
        if not (total.is_fully_addressable or total.is_fully_replicated):
            continue  # other processes have parts of it
        if jnp.issubdtype(total.dtype, jnp.floating):
            check_weights(float(total), int(estimate), total.dtype)
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
