"""Ranges of configuration fields, checked with messages that name the command-line flag."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """A range of numbers. No range contains NaN.

    Attributes:
        contains: whether a number is in the range.
        words: the range in words.
    """

    contains: Callable[[float], bool]
    words: str


# Comparisons are written so that they are False for NaN.
POSITIVE = Range(lambda x: 0 < x < math.inf, "a positive finite number")
NON_NEGATIVE = Range(lambda x: 0 <= x < math.inf, "a finite number of at least 0")
POSITIVE_OR_INFINITE = Range(lambda x: x > 0, "a positive number or inf")
DECAY = Range(lambda x: 0 <= x < 1, "a number of at least 0 and below 1")
FRACTION = Range(lambda x: 0 <= x <= 1, "a number from 0 to 1")
PROBABILITY = Range(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
LEVELS = Range(lambda x: 2 <= x <= 256, "a number from 2 to 256")
COUNT = Range(lambda x: x >= 1, "at least 1")
COUNT_OR_ZERO = Range(lambda x: x >= 0, "at least 0")


def check_ranges(config: Any, path: str, **ranges: Range) -> None:
    """Check that fields of a configuration are in their ranges.

    Args:
        config: a configuration. Fields that are None are not checked.
        path: the path of the configuration in an experiment, such as "optimizer"; "" for the
            experiment itself.
        **ranges: the range of each field to check, by name.

    Raises:
        ValueError: a field is NaN or out of range.

    Example:
        >>> from fedpax.experiments.optimizers import OptimizerConfig
        >>> check_ranges(OptimizerConfig(), "optimizer", learning_rate=POSITIVE)
    """
    for name, range_ in ranges.items():
        value = getattr(config, name)
        if value is not None and not range_.contains(value):
            flag = f"{path}.{name}" if path else name
            raise ValueError(
                f"{flag}={value}: expected {range_.words}. Set --{flag} to a value in this range."
            )
