"""Synchronous rounds over sites that train on their own data.

`run_coordinator` is the process of `fedpax syncer`, `take_part` of `fedpax join`.
"""

import importlib

from fedpax.lazy_names import lazy_names, warn_deprecated

# Its modules need the extra `sites`.
__all__, _get, __dir__ = lazy_names(__name__)


def __getattr__(name: str) -> object:
    """Import a public name on first use, also the names that are in `fedpax.islands` now."""
    if name in ("join", "run_syncer"):
        new = f"fedpax.islands.{name}"
        warn_deprecated(f"fedpax.sites.{name}", new, removed_in="0.3.0")
        return getattr(importlib.import_module("fedpax.islands"), name)
    return _get(name)
