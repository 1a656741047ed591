"""Arrays that JAX puts on a CPU device without a copy."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
"""JAX takes an array over in place if the address of its first byte is a multiple of this."""


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialized array that JAX need not copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def take_aligned(values: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    """Gather rows into a new array that JAX need not copy; the indices are in range."""
    if values.dtype.hasobject or not values.size:
        return values[indices]
    rows = aligned_empty((len(indices), *values.shape[1:]), values.dtype)
    # "raise" would write to a buffer first.
    return np.take(values, indices, axis=0, out=rows, mode="clip")
