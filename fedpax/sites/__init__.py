"""Synchronous rounds over sites that train on their own data.

- `site_experiment`: what an experiment offers to run over sites.
- `run_coordinator`: the process that holds the model and asks the sites (`fedpax syncer`).
- `take_part`: the process of a site (`fedpax join`).
- `update_filters`: the updates that a merge drops (`drop_large`, `drop_harmful`).
"""

import importlib
from typing import TYPE_CHECKING

from fedpax.deprecation import warn_deprecated
from fedpax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fedpax.sites.site_process import JoinResult as JoinResult
    from fedpax.sites.site_process import SyncerResult as SyncerResult
    from fedpax.sites.update_filters import AcceptIf as AcceptIf
    from fedpax.sites.update_filters import NormHistory as NormHistory
    from fedpax.sites.update_filters import drop_harmful as drop_harmful
    from fedpax.sites.update_filters import drop_large as drop_large
    from fedpax.sites.update_filters import parse_accept_if as parse_accept_if

_NAMES = {
    "fedpax.sites.site_process": "JoinResult SyncerResult",
    "fedpax.sites.update_filters": "AcceptIf NormHistory drop_harmful drop_large parse_accept_if",
}
# Its modules need the extra `sites`.
__all__, _get, __dir__ = lazy_names(__name__, _NAMES)


def __getattr__(name: str) -> object:
    """Import a public name on first use, also the names that are in `fedpax.islands` now."""
    if name in ("join", "run_syncer"):
        new = f"fedpax.islands.{name}"
        warn_deprecated(f"fedpax.sites.{name}", new, removed_in="0.3.0")
        return getattr(importlib.import_module("fedpax.islands"), name)
    return _get(name)
