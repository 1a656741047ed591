"""Public names of a package, imported with it or on first use, and old names."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType


def public_names(namespace: Mapping[str, object]) -> list[str]:
    """Make `__all__` of a package from what it imports, each name `as` itself."""
    public = (name for name in namespace if not name.startswith("_"))
    return sorted(name for name in public if not isinstance(namespace[name], ModuleType))


def lazy_names(
    package: str,
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Make `__all__`, `__getattr__` and `__dir__` of a package from its `__init__.pyi`.

    Each line there imports a name `as` itself; type checkers read the same file. Packages inside
    the package are attributes, and not in `__all__`.
    """
    modules = {}
    with open(f"{sys.modules[package].__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        for line in stub:
            match line.split():
                case ["from", module, "import", name, "as", _]:
                    modules[name] = module

    def get(name: str) -> object:
        """Import a public name on first use."""
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = modules[name]
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        """Return all names, imported or not."""
        return sorted({*modules, *(n for n in vars(sys.modules[package]) if n.startswith("__"))})

    return sorted(name for name in modules if modules[name] != package), get, list_names


def warn_deprecated(old: str, new: str, *, removed_in: str) -> None:
    """Warn at the caller's caller that a name is deprecated, until the version `removed_in`."""
    warnings.warn(
        f"{old} is deprecated and will be removed in fedpax {removed_in}. Use {new}.",
        DeprecationWarning,
        stacklevel=3,
    )
