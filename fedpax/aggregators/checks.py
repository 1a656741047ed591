"""Checks of the settings of aggregators and codecs. Each returns the setting as a Python number."""

import math
import numbers
from typing import Any


def check_number(
    function: str,
    argument: str,
    value: Any,
    *,
    remedy: str,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return a number in a range as a float. NaN and infinity raise.

    Args:
        function: name of the function that takes the argument.
        argument: name of the argument.
        value: a number, or a NumPy scalar.
        remedy: a sentence that ends the message, such as "Use 1.0."
        least: the smallest value. Default: no limit.
        above: a lower limit that the value must not equal. Default: no limit.
        most: the largest value. Default: no limit.
        below: an upper limit that the value must not equal. Default: no limit.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is out of range, infinite or NaN.

    Example:
        >>> check_number("clip_by_norm", "max_norm", -1.0, above=0, remedy="Use 1.0.")
        Traceback (most recent call last):
            ...
        ValueError: clip_by_norm(): max_norm is -1.0, expected a finite number above 0. Use 1.0.
    """
    limits = (("at least", least), ("above", above), ("at most", most), ("below", below))
    texts = [f"{text} {limit:g}" for text, limit in limits if math.isfinite(limit)]
    wanted = f"expected a finite number {' and '.join(texts)}. {remedy}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{function}(): {argument} is {value!r}, {wanted}")
    number = float(value)
    if not (math.isfinite(number) and least <= number <= most and above < number < below):
        raise ValueError(f"{function}(): {argument} is {value}, {wanted}")
    return number


def check_int(
    function: str,
    argument: str,
    value: Any,
    *,
    remedy: str,
    least: int | None = None,
    most: int | None = None,
) -> int:
    """Return an integer in a range as an int.

    Args:
        function: name of the function that takes the argument.
        argument: name of the argument.
        value: an int, or a NumPy integer.
        remedy: a sentence that ends the message.
        least: the smallest value. Default None: no limit.
        most: the largest value. Default None: no limit.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is out of range.

    Example:
        >>> check_int("krum", "num_byzantine", -1, least=0, remedy="Use 0 if there is none.")
        Traceback (most recent call last):
            ...
        ValueError: krum(): num_byzantine is -1, expected an int of at least 0. Use 0 if there is...
    """
    wanted = "expected an int"
    if least is not None:
        wanted += f" of at least {least}" if most is None else f" from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function}(): {argument} is {value!r}, {wanted}. {remedy}")
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{function}(): {argument} is {value}, {wanted}. {remedy}")
    return number


def check_seed(function: str, seed: Any) -> int:
    """Return a seed of random numbers.

    Raises:
        TypeError: the seed is not an integer.
        ValueError: the seed needs more than 32 bits, of which JAX would drop all others.
    """
    remedy = "Pass an int of your choice, such as 0: equal seeds give equal random numbers."
    return check_int(function, "seed", seed, remedy=remedy, least=-(2**31), most=2**32 - 1)
