"""Ranges of configuration fields, checked with messages that name the command-line flag."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints


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
    """Check the fields of a configuration: the names of choices, and numbers in their ranges.

    The command line checks names itself. A configuration that is made in Python is checked here.

    Args:
        config: a configuration. Each of its fields of a `Literal` type must have one of the type's
            values. Other fields that are None are not checked.
        path: the path of the configuration in an experiment, such as "optimizer"; "" for the
            experiment itself.
        **ranges: the range of each number to check, by name.

    Raises:
        ValueError: a field has a name that its type lacks, is NaN or is out of range.

    Example:
        >>> from fedpax.experiments.optimizers import OptimizerConfig
        >>> check_ranges(OptimizerConfig(name="lion"), "optimizer", learning_rate=POSITIVE)
    """
    prefix = f"{path}." if path else ""
    for name, hint in get_type_hints(type(config)).items():
        choices = get_args(hint) if get_origin(hint) is Literal else None
        if choices and (value := getattr(config, name)) not in choices:
            raise ValueError(
                f"{prefix}{name}={value!r}: expected one of {', '.join(choices)}. Set "
                f"--{prefix}{name} to one of them."
            )
    for name, range_ in ranges.items():
        value = getattr(config, name)
        if value is not None and not range_.contains(value):
            raise ValueError(
                f"{prefix}{name}={value}: expected {range_.words}. Set --{prefix}{name} to a value "
                "in this range."
            )
