"""The classes that a configuration of others may name: those of fedpax and of the experiment."""

import dataclasses
import importlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

from fedpax.errors import ArgumentTypeError


def name_of_class(kind: type) -> str:
    """Return `module:Name` of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_within_fedpax(name: str) -> bool:
    """Return whether `module:name` is in a module of fedpax.

    Example:
        >>> is_within_fedpax("fedpax.parallel.mesh:MeshConfig"), is_within_fedpax("mine:Model")
        (True, False)
    """
    return name.partition(":")[0].startswith("fedpax.")


def own_classes(experiment: Any) -> frozenset[type]:
    """Return the dataclasses outside of fedpax that an experiment's configuration may name.

    They are the classes of the experiment and its fields, and the dataclasses that their modules
    define or import.

    Args:
        experiment: an experiment, or another dataclass; its code is trusted.
    """
    used = {type(part) for part in _parts(experiment)}
    names = {kind.__module__ for kind in used if not is_within_fedpax(kind.__module__)}
    modules = [sys.modules[name] for name in names if name in sys.modules]
    beside = [value for module in modules for value in vars(module).values()]
    # By name: a module that was imported again has other classes than an older experiment.
    kinds = {name_of_class(kind): kind for kind in beside if isinstance(kind, type)}
    kinds |= {name_of_class(kind): kind for kind in used}
    return frozenset(
        kind
        for kind in kinds.values()
        if dataclasses.is_dataclass(kind) and not is_within_fedpax(kind.__module__)
    )


def _parts(value: Any) -> Iterator[Any]:
    """Yield a configuration and the dataclasses in it."""
    if isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))


def find_class(named: Any, own: Collection[type]) -> Any:
    """Return the class with this `module:Name`, or None."""
    return next((kind for kind in own if name_of_class(kind) == named), None)


def find_in_fedpax(named: str) -> Any:
    """Return the dataclass of fedpax with this `module:Name`; other attributes are not used."""
    module, _, name = named.partition(":")
    if not is_within_fedpax(named):
        raise ArgumentTypeError("the class has no name")
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    # A class can have moved: its former module still has it.
    is_class = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    if not is_class or not is_within_fedpax(kind.__module__):
        raise ArgumentTypeError(f"{named} is not a dataclass of fedpax")
    return kind
