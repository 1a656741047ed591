"""fedpax: federated and multi-island training as jitted JAX functions."""

import importlib

# A type checker takes this name as true. `typing` would be imported before Ctrl-C is handled.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from fedpax.clients.cohort import Cohort
    from fedpax.parallel.mesh import make_mesh
    from fedpax.primitives import (
        federated_broadcast,
        federated_map,
        federated_max,
        federated_mean,
        federated_min,
        federated_sum,
    )
    from fedpax.transforms import cost, explain, out_of_core, program

__version__ = "0.1.0"

__all__ = [
    "Cohort",
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
]

_MODULES = {
    "Cohort": "fedpax.clients.cohort",
    "cost": "fedpax.transforms",
    "explain": "fedpax.transforms",
    "make_mesh": "fedpax.parallel.mesh",
    "out_of_core": "fedpax.transforms",
    "program": "fedpax.transforms",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: the command line handles signals before it loads JAX."""
    if name not in __all__:
        raise AttributeError(f"module 'fedpax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES.get(name, "fedpax.primitives")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
