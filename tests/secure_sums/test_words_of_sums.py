"""Numbers as words whose sums are exact, or an error."""

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.secure_sums.arithmetic import NotSummableError, from_words, to_words

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")


@given(st.data(), st.sampled_from(INTEGERS), st.integers(1, 5))
def test_integer_sums_are_exact_or_raise(data: Any, dtype: str, count: int) -> None:
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


def test_complex_numbers_cannot_be_summed() -> None:
    """Their imaginary part was dropped."""
    with pytest.raises(NotSummableError, match="complex numbers"):
        to_words(np.array([1 + 2j], np.complex64))
