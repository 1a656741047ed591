"""Islands with runtimes of their own, which a syncer merges.

- `syncer`: the process that holds the outer model (`run_syncer`).
- `island`: the processes that train (`join`).
- `guards`: the updates that a merge drops (`drop_large`, `drop_harmful`).
- `transport`: the messages between them, and certificates.

Beside them: the format of a fragment, the identity of a run, and the files that the processes of
both sides open (`site_process`).
"""

from typing import TYPE_CHECKING

from fedpax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fedpax.sites.guards import AcceptIf as AcceptIf
    from fedpax.sites.guards import NormHistory as NormHistory
    from fedpax.sites.guards import drop_harmful as drop_harmful
    from fedpax.sites.guards import drop_large as drop_large
    from fedpax.sites.guards import parse_accept_if as parse_accept_if
    from fedpax.sites.island.join import join as join
    from fedpax.sites.site_process import JoinResult as JoinResult
    from fedpax.sites.site_process import SyncerResult as SyncerResult
    from fedpax.sites.syncer.run_syncer import run_syncer as run_syncer

_MODULES = {
    "AcceptIf": "fedpax.sites.guards",
    "JoinResult": "fedpax.sites.site_process",
    "NormHistory": "fedpax.sites.guards",
    "SyncerResult": "fedpax.sites.site_process",
    "drop_harmful": "fedpax.sites.guards",
    "drop_large": "fedpax.sites.guards",
    "join": "fedpax.sites.island.join",
    "parse_accept_if": "fedpax.sites.guards",
    "run_syncer": "fedpax.sites.syncer.run_syncer",
}
__all__ = list(_MODULES)
# Its packages need the extra `sites`.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
