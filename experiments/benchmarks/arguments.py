"""Types of command line options that take several values."""

import argparse
from collections.abc import Callable
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def integers(text: str) -> list[int]:
    """Parse integers separated by commas: the `type` of an argparse option.

    Raises:
        argparse.ArgumentTypeError: an entry is not an integer.

    Example:
        >>> integers("1,8")
        [1, 8]
    """
    return _parse(text, int, "integers", "2,8")


def numbers(text: str) -> list[float]:
    """Parse numbers separated by commas: the `type` of an argparse option.

    Raises:
        argparse.ArgumentTypeError: an entry is not a number.

    Example:
        >>> numbers("0.1,1e-3")
        [0.1, 0.001]
    """
    return _parse(text, float, "numbers", "0.1,0.3")


def _parse(
    text: str, parse: Callable[[str], _Number], expected: str, example: str
) -> list[_Number]:
    try:
        return [parse(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected {expected} separated by commas, such as {example}"
        ) from None
