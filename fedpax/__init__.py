"""fedpax: federated and multi-island training as jitted JAX functions."""

import functools

__version__ = "0.2.0"

__all__ = [
    "Cohort",
    "FederatedAlgorithm",
    "FedpaxError",
    "cost",
    "explain",
    "federated_broadcast",
    "federated_map",
    "federated_max",
    "federated_mean",
    "federated_min",
    "federated_sum",
    "make_mesh",
    "out_of_core",
    "program",
    "stages",
    "train",
]

_MODULES = {
    "Cohort": "fedpax.clients.cohort",
    "FederatedAlgorithm": "fedpax.algorithm",
    "FedpaxError": "fedpax.errors",
    "cost": "fedpax.inspect",
    "explain": "fedpax.inspect",
    "make_mesh": "fedpax.parallel.mesh",
    "out_of_core": "fedpax.transforms",
    "program": "fedpax.transforms",
    "stages": "fedpax.transforms",
    "train": "fedpax.commands.train_in_python:train",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: the command line handles signals before it loads JAX."""
    import importlib

    if name in __all__:
        module = _MODULES.get(name, "fedpax.primitives").partition(":")[0]
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value
    if name in _packages():
        return importlib.import_module(f"fedpax.{name}")
    raise AttributeError(f"module 'fedpax' has no attribute {name!r}")


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*dunders, *__all__, *_packages()})


@functools.cache
def _packages() -> list[str]:
    import pkgutil

    return [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
