"""Arrays that JAX puts on a CPU device without a copy, in memory that is written again."""

import math
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
"""JAX takes an array over in place if the address of its first byte is a multiple of this."""
_MOST_IDLE = 2  # cohorts: one is made while one waits and one is used
SHARED_BYTES = 2**23
"""Two threads gather rows of more bytes, because the gather waits for memory."""
_LONG_PADDING = 2**16
"""Padding is zeros if a client has at least this many bytes of it: fewer are not worth a call."""


class _Memory:
    """Bytes, and which rows of their array are zeros that need not be written again."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8).data
        self.zeros: NDArray[np.bool_] | bool = True


class ReusedMemory:
    """Memory for arrays of one field, which is reused once nothing refers to an array."""

    # The first write to new memory takes as long as the copy: the system clears its pages.

    def __init__(self) -> None:
        self._idle: list[_Memory] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized array that JAX need not copy."""
        array, memory = self.array(shape, dtype)
        memory.zeros = False
        return array

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[NDArray[Any], _Memory]:
        """Return an array that JAX need not copy, and its memory, which knows rows of zeros."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        memory = self._pop(size + ALIGNMENT)
        # The base of every view of this array, also of those that JAX or PyTorch keep.
        base = np.frombuffer(memory.bytes, np.uint8)
        weakref.finalize(base, _give_back, self._idle, memory).atexit = False
        start = -base.ctypes.data % ALIGNMENT
        return base[start : start + size].view(dtype).reshape(shape), memory

    def _pop(self, size: int) -> _Memory:
        with suppress(IndexError):  # another thread can have taken the last one
            if (memory := self._idle.pop()).bytes.nbytes == size:
                return memory
        return _Memory(size)


def _give_back(idle: list[_Memory], memory: _Memory) -> None:
    if len(idle) < _MOST_IDLE:
        idle.append(memory)


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros that JAX need not copy; pages that nothing writes take no memory."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def take_aligned(
    values: NDArray[Any],
    indices: NDArray[np.int64],
    memory: ReusedMemory,
    padding: NDArray[np.bool_] | None = None,
    *,
    read_only: bool = False,
) -> NDArray[Any]:
    """Gather rows into an array that JAX need not copy; the indices are in range."""
    # Rows of `padding`, bool `[clients, rows]`, are zeros where that saves time; padding of a
    # read-only array is not written again when its memory is reused.
    if values.dtype.hasobject or not values.size:
        return values[indices]
    rows, owner = memory.array((len(indices), *values.shape[1:]), values.dtype)
    middle = len(rows) // 2
    padded = 0 if padding is None else np.count_nonzero(padding) * rows[0].nbytes
    examples: NDArray[np.bool_] | None = None
    if padding is not None and padded >= _LONG_PADDING * len(padding):
        examples = ~padding.ravel()
        cleared = ~(examples | owner.zeros)
        if len(at := np.flatnonzero(examples)):  # each thread gathers half of them
            middle = int(at[len(at) // 2])
    owner.zeros = False  # until all rows are written

    def take(part: slice) -> None:
        for run in [part] if examples is None else _runs(examples, part):
            # "raise" would write to a buffer first.
            values.take(indices[run], 0, rows[run], "clip")
        for run in [] if examples is None else _runs(cleared, part):
            rows[run].view(np.uint8).fill(0)

    if rows.nbytes <= SHARED_BYTES:
        take(slice(0, len(rows)))
    else:
        with ThreadPoolExecutor(1) as threads:
            second_half = threads.submit(take, slice(middle, len(rows)))
            take(slice(0, middle))
            second_half.result()  # raises what `take` raised
    if read_only:
        owner.zeros, rows.flags.writeable = examples is not None and ~examples, False
    return rows


def _runs(mask: NDArray[np.bool_], part: slice) -> list[slice]:
    """Return the runs of True in a part of a mask."""
    edges = np.flatnonzero(np.diff(mask[part], prepend=False, append=False)) + part.start
    return [slice(*run) for run in edges.reshape(-1, 2).tolist()]


class ColumnReader:
    """Reads rows of arrays by their indices, into memory that is reused; see `take_aligned`."""

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = {name: (values, ReusedMemory()) for name, values in columns.items()}

    def __call__(
        self,
        indices: NDArray[np.int64],
        padding: NDArray[np.bool_] | None = None,
        *,
        read_only: bool = False,
    ) -> dict[str, NDArray[Any]]:
        """Gather the rows of each array."""
        return {
            name: take_aligned(values, indices, memory, padding, read_only=read_only)
            for name, (values, memory) in self._columns.items()
        }
