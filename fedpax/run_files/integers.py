"""Ranges of the integers of a configuration: what JAX and NumPy can take."""

import dataclasses
import numbers
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from fedpax.errors import ArgumentError

LARGEST = 2**63 - 1
LARGEST_ROUND = 2**31 - 1
SEEDS = (-(2**31), 2**32 - 1)
"""JAX drops all but 32 bits of a seed, so larger ones would equal others."""


def check_integers(config: Any, path: str = "") -> None:
    """Check the fields of type int of a configuration, and of the configurations in its fields."""
    try:
        hints = get_type_hints(type(config))
    except (NameError, TypeError):  # of a class in a function, with annotations as texts
        hints = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_integers(value, name)
            continue
        is_integer = _takes_integers(hints.get(field.name))
        for item in value if isinstance(value, tuple) else (value,):
            if is_integer and item is not None:
                _check(name, item)


def _takes_integers(hint: Any) -> bool:
    """Return whether an annotation is int, `int | None`, or a tuple of ints."""
    if get_origin(hint) in (types.UnionType, Union):
        kinds = set(get_args(hint)) - {types.NoneType}
        return len(kinds) == 1 and _takes_integers(kinds.pop())
    if get_origin(hint) is tuple:
        return set(get_args(hint)) - {...} == {int}
    return hint is int


def _check(name: str, value: Any) -> None:
    last = name.rpartition(".")[2]
    if last == "seed" or last.endswith("_seed"):
        least, most = SEEDS
        words = f"an integer from {least} to {most}"
    else:
        least, most = -LARGEST, LARGEST_ROUND if name.startswith("training.") else LARGEST
        words = f"an integer of at most {most}"
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        raise ArgumentError(
            f"{name}={value}: expected {words}. Set --{name} to a value in this range."
        )
