"""Islands of DiLoCo with their own runtimes, which a syncer merges.

- `syncer`: the process that holds the outer model (`run_syncer`).
- `island`: the processes that train (`join`).
"""

from typing import TYPE_CHECKING

from fedpax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fedpax.islands.island.join import join as join
    from fedpax.islands.syncer.run_syncer import run_syncer as run_syncer

_NAMES = {
    "fedpax.islands.island.join": "join",
    "fedpax.islands.syncer.run_syncer": "run_syncer",
}
# Its packages need the extra `sites`.
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
