"""Tests of ranges and of the checks of arguments."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.checks import (
    COUNT,
    DECAY,
    EVEN,
    FRACTION,
    NON_NEGATIVE,
    NON_NEGATIVE_OR_INFINITE,
    POSITIVE,
    POSITIVE_OR_INFINITE,
    PROBABILITY,
    SEED,
    IntRange,
    Range,
    check_argument,
    check_distinct,
)
from fedpax.errors import ArgumentError

NUMBERS = st.floats() | st.integers() | st.sampled_from([0, 1, 2, 0.0, 1.0, -0.0, 0.5])
REFERENCES = {
    Range(): math.isfinite,
    POSITIVE: lambda x: 0 < x < math.inf,
    POSITIVE_OR_INFINITE: lambda x: x > 0,
    NON_NEGATIVE: lambda x: 0 <= x < math.inf,
    NON_NEGATIVE_OR_INFINITE: lambda x: x >= 0,
    DECAY: lambda x: 0 <= x < 1,
    FRACTION: lambda x: 0 <= x <= 1,
    PROBABILITY: lambda x: 0 < x <= 1,
    COUNT: lambda x: isinstance(x, int) and x >= 1,
    EVEN: lambda x: isinstance(x, int) and x >= 2 and x % 2 == 0,
    SEED: lambda x: isinstance(x, int) and -(2**31) <= x < 2**32,
}


@pytest.mark.parametrize("expected", REFERENCES, ids=str)
@given(number=NUMBERS)
def test_a_range_contains_the_numbers_of_its_reference(expected: Range, number: float) -> None:
    assert (number in expected) == REFERENCES[expected](number)
    assert math.nan not in expected


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (Range(), "a finite number"),
        (POSITIVE, "a positive finite number"),
        (POSITIVE_OR_INFINITE, "a positive number or inf"),
        (NON_NEGATIVE, "a finite number of at least 0"),
        (NON_NEGATIVE_OR_INFINITE, "a number of at least 0 or inf"),
        (DECAY, "a number of at least 0 and below 1"),
        (FRACTION, "a number from 0 to 1"),
        (PROBABILITY, "a number above 0 and at most 1"),
        (Range(above=1.5), "a finite number above 1.5"),
        (IntRange(), "an int"),
        (COUNT, "an int of at least 1"),
        (SEED, "an int from -2147483648 to 4294967295"),
        (EVEN, "an even int of at least 2"),
    ],
)
def test_the_words_of_a_range(expected: Range, words: str) -> None:
    assert str(expected) == words


@pytest.mark.parametrize("value", [3, np.int8(3), 3.0, np.float32(3), jnp.float32(3), jnp.int32(3)])
def test_a_number_is_returned_as_a_float(value: float) -> None:
    number = check_argument("f", "x", value, POSITIVE, remedy="Use 1.0.")
    assert type(number) is float and number == 3


def test_an_integer_is_returned_as_an_int() -> None:
    assert type(check_argument("f", "n", np.uint8(3), COUNT, remedy="Use 1.")) is int
    with pytest.raises(
        ValueError, match=r"^f\(\): n is 0, expected an int of at least 1\. Use 1\.$"
    ):
        check_argument("f", "n", 0, COUNT, remedy="Use 1.")


@pytest.mark.parametrize("value", [None, "1", True, 1j, np.ones(2), jnp.ones(1), [1.0]])
def test_other_types_raise(value: object) -> None:
    for expected in (POSITIVE, COUNT):
        with pytest.raises(TypeError, match=rf"^f\(\): x is .*, expected {expected}\. Use 1\.$"):
            check_argument("f", "x", value, expected, remedy="Use 1.")


def test_a_name_twice_is_told() -> None:
    words = "data.columns names 'age' 2 times, expected once. Leave out all but one."
    with pytest.raises(ArgumentError, match=words):
        check_distinct("data.columns", ["age", "ward", "age"], remedy="Leave out all but one.")
