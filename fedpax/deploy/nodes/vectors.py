"""Terms as one vector of floats, which SecAgg+ makes integers of and masks.

Integer terms stay exact, floats become multiples of `2 * bound / range`.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedpax.errors import ArgumentError

MODULUS = 2**32
_LARGEST_RANGE = 2**30  # Flower rounds to int32


def range_of(participants: int) -> int:
    """Return the number of levels of a term: sums of all participants stay below the modulus."""
    levels = _LARGEST_RANGE
    while levels * participants >= MODULUS:
        levels //= 2
    return levels


def to_vector(terms: Sequence[Any], bound: float, levels: int) -> bytes:
    """Return terms as one vector of float64 within `bound`, in NumPy's format."""
    parts = []
    for term in terms:
        values = np.asarray(term).astype(np.float64).ravel()
        is_integer = np.asarray(term).dtype.kind in "iub"
        values = values * (2 * bound / levels) if is_integer else values
        largest = np.abs(values).max(initial=0.0)
        if not largest < bound:
            # The server reads this, so that the value is left out.
            most = levels / 2 if is_integer else bound
            raise ArgumentError(
                f"A term of this participant has a value of {most:g} or more, or NaN, expected "
                "less for a secure sum. Set --run-config 'secure-bound=...' to a larger number for "
                "floats, or divide the weights in the program."
            )
        parts.append(values)
    file = io.BytesIO()
    np.save(file, np.concatenate([*parts, np.zeros(0)]), allow_pickle=False)
    return file.getvalue()


def from_vector(
    total: Any, terms: Sequence[Mapping[str, Any]], bound: float, levels: int
) -> list[Any]:
    """Return the sums of terms from the sum of vectors of `to_vector`."""
    sums, start = [], 0
    for term in terms:
        dtype = np.dtype(term["dtype"])
        size = int(np.prod(term["shape"]))
        values = np.asarray(total[start : start + size], np.float64).reshape(term["shape"])
        start += size
        if dtype.kind in "iub":
            values = np.rint(values * levels / (2 * bound))
        sums.append(values.astype(dtype))
    return sums
