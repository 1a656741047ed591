"""Public names of a package, which are imported with it or on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType


def public_names(namespace: Mapping[str, object]) -> list[str]:
    """Make `__all__` of a package from what it imports, each name `as` itself."""
    public = (name for name in namespace if not name.startswith("_"))
    return sorted(name for name in public if not isinstance(namespace[name], ModuleType))


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Make `__all__`, `__getattr__` and `__dir__` of a package, from the names of each module.

    Type checkers read the names from its `__init__.pyi`, or from imports under `TYPE_CHECKING`.
    """
    modules = {name: module for module, several in names.items() for name in several.split()}

    def get(name: str) -> object:
        """Import a public name on first use."""
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name].partition(":")[0]), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        """Return all names, imported or not."""
        return sorted({*vars(sys.modules[package]), *modules})

    return sorted(modules), get, list_names
