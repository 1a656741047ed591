"""fedpax: federated and multi-island training as jitted JAX functions."""

import functools

from fedpax.lazy_names import lazy_names

__version__ = "0.2.0"

_NAMES = {
    "fedpax.algorithm": "FederatedAlgorithm",
    "fedpax.clients.cohort": "Cohort",
    "fedpax.commands.train_object:train": "train",
    "fedpax.errors": "FedpaxError",
    "fedpax.inspect": "cost explain",
    "fedpax.parallel.mesh": "make_mesh",
    "fedpax.primitives": (
        "federated_broadcast federated_map federated_max federated_mean federated_min federated_sum"
    ),
    "fedpax.transforms": "out_of_core program stages",
}
__all__, _get, _ = lazy_names(__name__, _NAMES)


def __getattr__(name: str) -> object:
    """Import a public name on first use: the command line handles signals before it loads JAX."""
    if name not in _packages():
        return _get(name)
    import importlib

    return importlib.import_module(f"fedpax.{name}")


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*dunders, *__all__, *_packages()})


@functools.cache
def _packages() -> list[str]:
    import pkgutil

    return [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
