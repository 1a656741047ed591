"""Checks of numbers and names, in arguments of functions and in fields of configurations."""

import dataclasses
import functools
import math
import numbers
import operator
import types
from collections import Counter
from collections.abc import Iterable
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import jax.numpy as jnp

from fedpax.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of numbers. No range contains NaN; one contains infinity only with `most=math.inf`.

    Attributes:
        least: the smallest number, if not None.
        above: a lower limit that the range does not contain, if not None.
        most: the largest number. None: no limit, without infinity.
        below: an upper limit that the range does not contain, if not None.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        """Return whether a number is in the range."""
        return (  # comparisons that are False for NaN
            (self.least is None or number >= self.least)
            and (number > -math.inf if self.above is None else number > self.above)
            and (self.below is None or number < self.below)
            and (number < math.inf if self.most is None else number <= self.most)
        )

    def __str__(self) -> str:
        """Describe the range for a message."""
        limits = {"at least": self.least, "above": self.above}
        limits |= {"below": self.below, "at most": self.most}
        known = {word: x for word, x in limits.items() if x is not None and math.isfinite(x)}
        suffix = " or inf" if self.most == math.inf else ""
        if known == {"above": 0}:
            return f"a positive {'number' if suffix else 'finite number'}{suffix}"
        finite = len(known) < 2 and not suffix
        return f"a {'finite ' if finite else ''}number{_describe(known)}{suffix}"


@dataclasses.dataclass(frozen=True)
class IntRange(Range):
    """A range of integers, or of even ones."""

    least: int | None = None
    most: int | None = None
    even: bool = False

    def __contains__(self, number: float) -> bool:
        """Return whether a number is an integer in the range."""
        in_range = _is_integer(number) and super().__contains__(number)
        return in_range and not (self.even and number % 2)

    def __str__(self) -> str:
        """Describe the range for a message."""
        known = {"at least": self.least, "at most": self.most}
        limits = _describe({word: limit for word, limit in known.items() if limit is not None})
        return f"{'an even' if self.even else 'an'} int{limits}"


def _describe(limits: dict[str, Any]) -> str:
    if limits.keys() == {"at least", "at most"}:
        return f" from {limits['at least']} to {limits['at most']}"
    texts = [f"{word} {limit}" for word, limit in limits.items()]
    return f"{' of' if texts[:1] and 'at' in texts[0] else ''} {' and '.join(texts)}".rstrip()


POSITIVE = Range(above=0)
POSITIVE_OR_INFINITE = Range(above=0, most=math.inf)
NON_NEGATIVE = Range(least=0)
NON_NEGATIVE_OR_INFINITE = Range(least=0, most=math.inf)
DECAY = Range(least=0, below=1)
FRACTION = Range(least=0, most=1)
PROBABILITY = Range(above=0, most=1)
COUNT = IntRange(least=1)
COUNT_OR_ZERO = IntRange(least=0)
EVEN = IntRange(least=2, even=True)
SEED = IntRange(least=-(2**31), most=2**32 - 1)
"""JAX drops all but 32 bits of a seed, so larger ones would equal others."""
INT32 = IntRange(least=-(2**31) + 1, most=2**31 - 1)
INT64 = IntRange(least=-(2**63) + 1, most=2**63 - 1)


@overload
def check_argument(
    function: str, argument: str, value: Any, expected: IntRange, *, remedy: str
) -> int: ...
@overload
def check_argument(
    function: str, argument: str, value: Any, expected: Range, *, remedy: str
) -> float: ...
def check_argument(
    function: str, argument: str, value: Any, expected: Range, *, remedy: str
) -> float:
    """Return a number in a range as a Python number, or raise an error that ends in `remedy`."""
    is_integer = isinstance(expected, IntRange)
    is_number = _is_integer(value) if is_integer else _is_number(value)
    if not is_number:
        shown = repr(value) if value is None or isinstance(value, str | int | float) else None
        shown = shown or f"a {type(value).__name__}"
        raise ArgumentTypeError(
            f"{function}(): {argument} is {shown}, expected {expected}. {remedy}"
        )
    number = int(value) if is_integer else float(value)
    if number not in expected:
        raise ArgumentError(f"{function}(): {argument} is {value}, expected {expected}. {remedy}")
    return number


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Real):  # NumPy's scalars are
        return not isinstance(value, bool)
    is_array = hasattr(value, "dtype") and jnp.ndim(value) == 0
    return is_array and any(jnp.issubdtype(value.dtype, t) for t in (jnp.floating, jnp.integer))


def check_seed(function: str, seed: Any) -> int:
    """Return a seed of random numbers, of at most 32 bits, as an int, or raise."""
    remedy = "Pass an int of your choice, such as 0: equal seeds give equal random numbers."
    return check_argument(function, "seed", seed, SEED, remedy=remedy)


Count: TypeAlias = Annotated[int, COUNT]
CountOrZero: TypeAlias = Annotated[int, COUNT_OR_ZERO]
Positive: TypeAlias = Annotated[float, POSITIVE]
PositiveOrInfinite: TypeAlias = Annotated[float, POSITIVE_OR_INFINITE]
NonNegative: TypeAlias = Annotated[float, NON_NEGATIVE]
NonNegativeOrInfinite: TypeAlias = Annotated[float, NON_NEGATIVE_OR_INFINITE]
Decay: TypeAlias = Annotated[float, DECAY]
Fraction: TypeAlias = Annotated[float, FRACTION]
Probability: TypeAlias = Annotated[float, PROBABILITY]


@dataclasses.dataclass(frozen=True)
class CheckedConfig:
    """A configuration whose fields are checked when it is made; the base of an experiment's parts.

    It checks what is made in Python; the command line checks types and names itself.

    Attributes:
        group: the experiment's field that holds the configuration, for messages.
    """

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self, self.group)


def check_fields(config: Any, path: str) -> None:
    """Check a configuration's fields with the type `Literal`, or a type such as `Count`."""
    prefix = f"{path}." if path else ""
    for name, hint in _hints(config.__class__).items():
        value: Any = getattr(config, name, None)
        is_union = get_origin(hint) in (types.UnionType, Union)
        members = get_args(hint) if is_union else (hint,)
        choices = [choice for m in members if get_origin(m) is Literal for choice in get_args(m)]
        if value in choices or (value is None and (is_union or not choices)):
            continue
        ranges = [
            r for m in members for r in getattr(m, "__metadata__", ()) if isinstance(r, Range)
        ]
        if choices and (isinstance(value, str) or not ranges):
            raise ArgumentError(
                f"{prefix}{name}={value!r}: expected one of {', '.join(choices)}. Set "
                f"--{prefix}{name} to one of them."
            )
        for expected in ranges:
            _check_field(f"{prefix}{name}", value, expected)


def _check_field(name: str, value: Any, expected: Range) -> None:
    if value not in expected:
        raise ArgumentError(
            f"{name}={value}: expected {expected}. Set --{name} to a value in this range."
        )


@functools.cache
def _hints(class_: type) -> dict[str, Any]:
    try:
        return get_type_hints(class_, include_extras=True)
    except (AttributeError, NameError, TypeError):  # such as annotations of a class in a function
        return {}


def check_distinct(argument: str, names: Iterable[str], *, remedy: str) -> None:
    """Raise for the first name that an argument has more than once."""
    for name, times in Counter(names).items():
        if times > 1:
            raise ArgumentError(f"{argument} names {name!r} {times} times, expected once. {remedy}")


def check_integers(**numbers: Any) -> None:
    """Raise a TypeError that names the first number that is not an integer, such as 2.5 clients."""
    for name, number in numbers.items():
        try:
            operator.index(number)
        except TypeError:
            raise ArgumentTypeError(
                f"{name} is {number!r:.80}, expected an integer. Convert it with int(...)."
            ) from None


def check_integer_fields(config: Any, path: str = "") -> None:
    """Check the fields of type int of a configuration, and of the configurations in its fields."""
    hints = _hints(config.__class__)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_integer_fields(value, name)
            continue
        is_seed = field.name == "seed" or field.name.endswith("_seed")
        expected = SEED if is_seed else INT32 if path == "training" else INT64
        items = value if isinstance(value, tuple) else (value,)
        for item in items if _takes_integers(hints.get(field.name)) else ():
            if item is not None:
                _check_field(name, item, expected)


def _takes_integers(hint: Any) -> bool:
    """Return whether an annotation is int, `int | None`, or a tuple of ints."""
    if get_origin(hint) is Annotated:
        return _takes_integers(get_args(hint)[0])
    if get_origin(hint) in (types.UnionType, Union):
        members = set(get_args(hint)) - {types.NoneType}
        return len(members) == 1 and _takes_integers(members.pop())
    if get_origin(hint) is tuple:
        return set(get_args(hint)) - {...} == {int}
    return hint is int
