"""Ranges of configuration fields, checked with messages that name the command-line flag."""

import math
from collections.abc import Callable, Sequence
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
BELOW_HALF = Range(lambda x: 0 <= x < 0.5, "a number of at least 0 and below 0.5")
FRACTION = Range(lambda x: 0 <= x <= 1, "a number from 0 to 1")
PROBABILITY = Range(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
LEVELS = Range(lambda x: 2 <= x <= 256, "a number from 2 to 256")
CODE_BITS = Range(lambda x: 1 <= x <= 16, "a number from 1 to 16")
MASKED_BITS = Range(lambda x: 2 <= x <= 24, "a number from 2 to 24")
EVEN = Range(lambda x: x >= 2 and x % 2 == 0, "an even number of at least 2")
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


def check_choice(config: Any, path: str, name: str, choices: Sequence[str]) -> None:
    """Check that a field of a configuration has one of its names.

    The command line checks the names itself. A configuration that is made in Python is checked
    here.

    Args:
        config: a configuration.
        path: the path of the configuration in an experiment, such as "aggregator".
        name: the field.
        choices: the names.

    Raises:
        ValueError: the field has another value.

    Example:
        >>> from fedpax.experiments.client_aggregators import CODECS, CompressedMean
        >>> check_choice(CompressedMean(codec="sign"), "aggregator", "codec", CODECS)
    """
    if (value := getattr(config, name)) not in choices:
        raise ValueError(
            f"{path}.{name}={value!r}: expected one of {', '.join(choices)}. Set --{path}.{name} "
            "to one of them."
        )
