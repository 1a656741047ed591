"""The classes that a configuration of others may name: fedpax's and the experiment's."""

import dataclasses
import importlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

from fedpax.errors import ArgumentTypeError


def name_of_class(class_: type) -> str:
    """Return `module:Name` of a class."""
    return f"{class_.__module__}:{class_.__qualname__}"


def is_within_fedpax(name: str) -> bool:
    """Return whether `module:name` is in a module of fedpax.

    Example:
        >>> is_within_fedpax("fedpax.parallel.mesh:MeshConfig"), is_within_fedpax("mine:Model")
        (True, False)
    """
    return name.partition(":")[0].startswith("fedpax.")


def own_classes(experiment: Any) -> frozenset[type]:
    """Return the dataclasses outside of fedpax that an experiment's configuration may name."""
    # They are the classes of the experiment and its fields, and the dataclasses that their modules
    # define or import.
    used = {type(part) for part in _parts(experiment)}
    names = {class_.__module__ for class_ in used if not is_within_fedpax(class_.__module__)}
    modules = [sys.modules[name] for name in names if name in sys.modules]
    beside = [value for module in modules for value in vars(module).values()]
    # By name: a module that was imported again has other classes than an older experiment.
    kinds = {name_of_class(class_): class_ for class_ in beside if isinstance(class_, type)}
    kinds |= {name_of_class(class_): class_ for class_ in used}
    return frozenset(
        class_
        for class_ in kinds.values()
        if dataclasses.is_dataclass(class_) and not is_within_fedpax(class_.__module__)
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


def find_class(named: Any, classes: Collection[type]) -> Any:
    """Return the class with this `module:Name`, or None."""
    return next((class_ for class_ in classes if name_of_class(class_) == named), None)


def find_in_fedpax(named: str) -> Any:
    """Return the dataclass of fedpax with this `module:Name`; other attributes are not used."""
    module, _, name = named.partition(":")
    if not is_within_fedpax(named):
        raise ArgumentTypeError("the class has no name")
    class_: Any = importlib.import_module(module)
    for part in name.split("."):
        class_ = getattr(class_, part)
    # A class can have moved: its former module still has it.
    is_class = isinstance(class_, type) and dataclasses.is_dataclass(class_)
    if not is_class or not is_within_fedpax(class_.__module__):
        raise ArgumentTypeError(f"{named} is not a dataclass of fedpax")
    return class_
