"""Arrays that JAX puts on a CPU device without a copy, in memory that is written again."""

import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
"""JAX takes an array over in place if the address of its first byte is a multiple of this."""
_MOST_IDLE = 2  # cohorts: one is made while one waits and one is used
SHARED_BYTES = 2**23
"""Two threads gather rows of more bytes, because the gather waits for memory."""


class ReusedMemory:
    """Memory for arrays of one field; an array's memory is reused once nothing refers to it.

    The first write to new memory takes as long as the copy, because the system clears its pages.
    """

    def __init__(self) -> None:
        self._idle: list[memoryview] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized array that JAX need not copy."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = self._pop(size + ALIGNMENT)
        # The base of every view of this array, also of those that JAX or PyTorch keep.
        base = np.frombuffer(memory, np.uint8)
        weakref.finalize(base, _give_back, self._idle, memory).atexit = False
        start = -base.ctypes.data % ALIGNMENT
        return base[start : start + size].view(dtype).reshape(shape)

    def _pop(self, size: int) -> memoryview:
        with suppress(IndexError):  # another thread can have taken the last one
            if (memory := self._idle.pop()).nbytes == size:
                return memory
        return np.empty(size, np.uint8).data


def _give_back(idle: list[memoryview], memory: memoryview) -> None:
    if len(idle) < _MOST_IDLE:
        idle.append(memory)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialized array that JAX need not copy."""
    return ReusedMemory().empty(shape, dtype)


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros that JAX need not copy; pages that nothing writes take no memory."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def take_aligned(
    values: NDArray[Any], indices: NDArray[np.int64], memory: ReusedMemory
) -> NDArray[Any]:
    """Gather rows into an array that JAX need not copy; the indices are in range."""
    if values.dtype.hasobject or not values.size:
        return values[indices]
    rows = memory.empty((len(indices), *values.shape[1:]), values.dtype)

    def take(part: slice) -> None:
        # "raise" would write to a buffer first.
        np.take(values, indices[part], axis=0, out=rows[part], mode="clip")

    if rows.nbytes <= SHARED_BYTES:
        take(slice(None))
        return rows
    middle = len(indices) // 2
    second_half = threading.Thread(target=take, args=(slice(middle, None),))
    second_half.start()
    take(slice(middle))
    second_half.join()
    return rows
