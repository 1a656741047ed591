"""Types of command line options that take several values."""

import argparse
import math
from collections.abc import Callable
from typing import Literal, TypeVar

_Value = TypeVar("_Value")


def integers(text: str) -> list[int]:
    """Parse integers separated by commas: the `type` of an argparse option.

    Raises:
        argparse.ArgumentTypeError: an entry is not an integer of at least 1.

    Example:
        >>> integers("1,8")
        [1, 8]
    """
    return several(text, integer, "integers of at least 1", "2,8")


def numbers(text: str) -> list[float]:
    """Parse numbers separated by commas: the `type` of an argparse option.

    Raises:
        argparse.ArgumentTypeError: an entry is not a finite number of at least 0.

    Example:
        >>> numbers("0.1,1e-3")
        [0.1, 0.001]
    """
    return several(text, number, "numbers of at least 0", "0.1,0.3")


def integer(text: str) -> int:
    """Parse an integer of at least 1, or raise a ValueError."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def number(text: str) -> float:
    """Parse a finite number of at least 0, or raise a ValueError."""
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


def chunk_size(text: str) -> int | Literal["auto"]:
    """Parse "auto" or an integer of at least 1, or raise a ValueError."""
    return "auto" if text == "auto" else integer(text)


def several(text: str, parse: Callable[[str], _Value], expected: str, example: str) -> list[_Value]:
    """Parse values separated by commas.

    Args:
        text: the text.
        parse: parses an entry, or raises a ValueError.
        expected: what entries are.
        example: a valid text.

    Raises:
        argparse.ArgumentTypeError: an entry is invalid.
    """
    try:
        return [parse(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected {expected} separated by commas, such as {example}"
        ) from None
