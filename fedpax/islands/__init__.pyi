"""The public names of islands, for type checkers and `fedpax.lazy_names`."""

from fedpax.islands.island.join import join as join
from fedpax.islands.syncer.run_syncer import run_syncer as run_syncer
