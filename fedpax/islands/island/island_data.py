"""The data of one island: its row of the cohorts that an experiment draws."""

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.clients.cohort import Cohort
from fedpax.clients.cohort_stream import CohortStream, IslandStream
from fedpax.errors import ArgumentError
from fedpax.parallel.axes import ShardingTree
from fedpax.training.prefetch import Prefetch

ENDLESS = 2**31


class IslandRows:
    """A stream of one island's batches, `[steps, batch, ...]`: shard k of a stream of cohorts."""

    # Thus island k trains on the same batches, in the same order, as island k of `fedpax train`. If
    # the stream can read the rows of one island alone (`IslandStream`), other rows are not read.

    def __init__(self, stream: CohortStream, shard: int) -> None:
        self._stream, self._shard = stream, shard
        if isinstance(stream, IslandStream):
            stream.keep_island(shard)

    def __next__(self) -> Cohort:
        """Return the island's batches of the next round."""
        cohort = next(self._stream)
        if cohort.num_steps is not None:
            raise ArgumentError(
                "the experiment's cohorts have num_steps, expected None: islands with runtimes of "
                "their own take every step of a round. Mark padding in a field 'mask'."
            )
        several = jax.process_count() > 1  # then a process has the rows of its devices alone
        row = _Row if several else operator.getitem
        return Cohort(jax.tree.map(lambda x: row(x, self._shard), cohort.batches))

    def get_state(self) -> dict[str, Any] | bytes:
        """Return the stream's position."""
        return self._stream.get_state()

    def set_state(self, state: Any) -> None:
        """Move to a position from `get_state`."""
        self._stream.set_state(state)


class _Row:
    """One row of an array whose blocks are read by indexing, as `array[row]` would read all."""

    def __init__(self, array: Any, row: int) -> None:
        self._array, self._row = array, row
        self.shape, self.dtype = array.shape[1:], array.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a block of the row."""
        index = index if isinstance(index, tuple) else (index,)
        block: np.ndarray = self._array[(slice(self._row, self._row + 1), *index)][0]
        return block


class ShardPrefetch:
    """The batches of an island's shard, drawn ahead by a thread."""

    # If the shard changes, the data of the new shard begin at their first round.

    def __init__(
        self,
        cohorts: CohortStream,
        reopen: Callable[[], CohortStream],
        shardings: ShardingTree,
        shard: int,
        state: Any = None,
    ) -> None:
        self._reopen, self._shardings = reopen, row_shardings(shardings)
        self._stack = contextlib.ExitStack()
        self._open(cohorts, shard, state)

    def next(self, shard: int) -> tuple[Any, Any]:
        """Return the batches of the next round of a shard, and the position after them."""
        if shard != self.shard:
            self._stack.close()
            self._open(self._reopen(), shard, None)
        return self._prefetch.next()

    def _open(self, cohorts: CohortStream, shard: int, state: Any) -> None:
        rows = IslandRows(cohorts, shard)
        if state is not None:
            rows.set_state(state)
        prefetch = Prefetch(rows, self._shardings, ENDLESS)
        self._prefetch, self.shard = self._stack.enter_context(prefetch), shard

    def __enter__(self) -> "ShardPrefetch":
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the thread."""
        self._stack.close()


def row_shardings(cohort: ShardingTree) -> ShardingTree:
    """Return the shardings of one row of a cohort."""

    def row(sharding: Any) -> NamedSharding:
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))

    if isinstance(cohort, NamedSharding):
        return row(cohort)
    whole: Any = cohort
    rows: Any = Cohort(jax.tree.map(row, whole.batches))
    return rows
