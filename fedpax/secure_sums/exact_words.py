"""Numbers as integers of 32 bits whose sums are exact.

Floats are sent as multiples of 2^-24, in three words of 21 bits: the sums of the words do not
overflow, so the sum is exact.
"""

import numpy as np

from fedpax.errors import FedpaxError

WORDS, _BITS, _SCALE = 3, 21, 2.0**24
_LARGEST_FLOAT, _LARGEST_INTEGER = 2.0**29, 2**53  # such that 500 of them do not overflow


class NotSummableError(FedpaxError, ValueError):
    """A term that cannot be part of a sum, such as NaN, or a sum that its dtype cannot hold."""


def to_words(x: np.ndarray) -> np.ndarray:
    """Return numbers as words `[..., 3]`, which can be summed."""
    x = np.asarray(x)
    if x.dtype.kind in "biu":
        if x.size and not np.abs(x.astype(np.float64)).max() < _LARGEST_INTEGER:
            raise NotSummableError("it has integers of 2**53 or more")
        value = x.astype(np.int64)
    elif x.dtype.kind == "c":
        raise NotSummableError("it has complex numbers")
    else:
        floats = x.astype(np.float64)
        if not np.all(np.abs(floats) < _LARGEST_FLOAT):
            raise NotSummableError("it has NaN, or numbers of 2**29 or more")
        value = np.rint(floats * _SCALE).astype(np.int64)
    parts = [(value >> (_BITS * k)) & ((1 << _BITS) - 1) for k in range(WORDS)]
    return np.stack(parts, -1).astype(np.uint32)


def from_words(words: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the numbers whose words, or sums of words, are given."""
    parts = words.view(np.uint32).astype(np.uint64)
    shifts = np.uint64(_BITS) * np.arange(WORDS, dtype=np.uint64)
    total = np.sum(parts << shifts, -1, dtype=np.uint64) & np.uint64(2**63 - 1)
    value = np.where(total >= 2**62, total | np.uint64(2**63), total).view(np.int64)
    if dtype.kind not in "biu":
        return np.asarray(value / _SCALE).astype(dtype)
    if dtype.kind != "b" and value.size:
        info = np.iinfo(dtype)
        if (beyond := value[(value < info.min) | (value > info.max)]).size:
            raise NotSummableError(
                f"A sum of integers is {beyond.flat[0]}, expected {info.min} to {info.max} "
                f"({dtype}). Sum floats, or divide the terms."
            )
    return np.asarray(value).astype(dtype)
