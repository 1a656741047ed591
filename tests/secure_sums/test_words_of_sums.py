"""Numbers as words whose sums are exact, or an error."""

from fractions import Fraction
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.secure_sums.arithmetic import (
    NotSummableError,
    from_words,
    to_exact_words,
    to_words,
)

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")


@pytest.mark.parametrize("to_words", [to_words, to_exact_words])
@given(data=st.data(), dtype=st.sampled_from(INTEGERS), count=st.integers(1, 5))
def test_integer_sums_are_exact_or_raise(to_words: Any, data: Any, dtype: str, count: int) -> None:
    info = np.iinfo(dtype)
    low, high = max(info.min, 1 - 2**53), min(info.max, 2**53 - 1)
    arrays = hnp.arrays(dtype, 3, elements=st.integers(low, high))
    terms = [data.draw(arrays) for _ in range(count)]
    total = np.sum([to_words(x) for x in terms], 0, np.uint32)
    exact = [sum(int(x[i]) for x in terms) for i in range(3)]
    if info.min <= min(exact) and max(exact) <= info.max:
        assert from_words(total, np.dtype(dtype)).tolist() == exact
    else:
        with pytest.raises(NotSummableError, match=rf"A sum of integers is .*\({dtype}\)"):
            from_words(total, np.dtype(dtype))


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.integers(1, 5).flatmap(lambda n: hnp.arrays(np.float32, (n, 2, 3), elements=FINITE)))
def test_sums_of_float32_of_any_size_are_exact(values: np.ndarray) -> None:
    words = np.sum([to_exact_words(x) for x in values], 0, np.uint32)
    exact = [float(sum(map(Fraction, x.tolist()))) for x in values.reshape(len(values), -1).T]
    assert from_words(words.view(np.int32), np.dtype(np.float64)).ravel().tolist() == exact


def test_500_of_the_largest_float32_do_not_overflow() -> None:
    largest = np.finfo(np.float32).max * np.float64([1, -1])
    words = (500 * to_exact_words(largest).astype(np.uint64)).astype(np.uint32)
    np.testing.assert_array_equal(from_words(words, np.dtype(np.float64)), 500 * largest)
    for x in (np.nan, np.inf):
        with pytest.raises(NotSummableError, match=r"it has NaN, or numbers of 2\*\*128 or more"):
            to_exact_words(np.float32([1.0, x]))


def test_complex_numbers_cannot_be_summed() -> None:
    """Their imaginary part was dropped."""
    with pytest.raises(NotSummableError, match="complex numbers"):
        to_words(np.array([1 + 2j], np.complex64))
