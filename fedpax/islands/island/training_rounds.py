"""The rounds of an island that has joined: inner steps, waits for merges, metrics, checkpoints."""

import contextlib
import math
import operator
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.algorithm import AlgorithmParts, Metrics
from fedpax.clients.cohort import Cohort, CohortStream, IslandStream
from fedpax.errors import ArgumentError
from fedpax.islands.island.island import Island, SharedLink
from fedpax.parallel.axes import ShardingTree
from fedpax.run_files.configuration import to_json
from fedpax.run_files.metrics import MetricsWriter, select
from fedpax.sites.site_process import SECONDS_BETWEEN_NOTES
from fedpax.training.experiment import Experiment
from fedpax.training.prefetch import Prefetch
from fedpax.training.progress import Progress
from fedpax.training.round_logger import NonFiniteError
from fedpax.training.run_writers import RunFiles

ENDLESS = 2**31


class IslandRows:
    """A stream of one island's batches, `[steps, batch, ...]`: shard k of a stream of cohorts."""

    # Island k trains on the batches of island k of `fedpax train`. An `IslandStream` reads these
    # rows alone.

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


class IslandLog:
    """A writer of metrics, which it fetches from the devices one round later."""

    def __init__(
        self,
        metrics: MetricsWriter,
        progress: Progress,
        *,
        transferred_bytes: Callable[[], int],
        started: float,
        items_per_round: int,
        stop_on_non_finite: bool,
    ) -> None:
        self._metrics, self._progress = metrics, progress
        self._transferred_bytes = transferred_bytes
        self._items_per_round = items_per_round
        self._stop_on_non_finite = stop_on_non_finite
        before = (select(metrics.kept, "training") or [{}])[-1]
        self._started = started - (before.get("wall_seconds") or 0.0)
        self._bytes_before = before.get("bytes_across_placement") or 0.0
        self._pending: tuple[int, Metrics, float] | None = None
        self._clock = time.perf_counter()

    def add(self, round_number: int, metrics: Metrics, waited_seconds: float) -> None:
        """Accept the metrics of a dispatched round, and log the round before it."""
        self.flush()
        self._pending = round_number, metrics, waited_seconds

    def flush(self) -> None:
        """Wait for the round that was dispatched last, and log it."""
        if self._pending is None:
            return
        (number, metrics, waited), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        rate = self._items_per_round / seconds
        self._metrics.write(
            "training",
            number,
            {
                **values,
                "items": number * self._items_per_round,
                "bytes_across_placement": self._bytes_before + self._transferred_bytes(),
                "seconds": seconds,
                "merge_wait_fraction": min(waited / seconds, 1.0),
                "items_per_second": rate,
                "wall_seconds": now - self._started,
            },
        )
        self._progress.show_round(number, values["loss"], rate)
        if self._stop_on_non_finite and not math.isfinite(values["loss"]):
            raise NonFiniteError(
                f"the loss of this island's round {number} is {values['loss']}, expected a finite "
                "value. Start again with a smaller learning rate or with clipped gradients."
            )


SECONDS_TO_FLUSH = 5.0


class TrainingRounds:
    """The rounds of an island, from round `done` on."""

    def __init__(
        self,
        experiment: Experiment,
        parts: AlgorithmParts,
        island: Island,
        exchange: SharedLink,
        files: RunFiles,
        log: IslandLog,
        done: int,
        give_up_after: float,
    ) -> None:
        self._experiment, self._parts = experiment, parts
        self._island, self._exchange = island, exchange
        self._checkpoints, self._metrics = files.checkpoints, files.metrics
        self._progress, self._log = files.progress, log
        self._give_up_after = give_up_after
        self.done = self._saved = done
        self.gave_up = False  # because no syncer answers
        self._has_told_lead = False

    def train(self, data: ShardPrefetch, *frozen: Any) -> None:
        """Train until the syncer has finished, a signal asks to stop, or no syncer answers."""
        stream_state: Any = None
        every = self._experiment.training.checkpoint_every
        while not self._island.must_stop():
            shard = self._island.shard
            if shard != data.shard:
                self._progress.note(f"has shard {shard} now, another island has {data.shard}")
            cohort, stream_state = data.next(shard)
            if not self._train_round(cohort.batches, *frozen):
                break
            if every and self.done % every == 0:
                self._save(data.shard, stream_state)
        self._island.finish(SECONDS_TO_FLUSH)
        if self.done > self._saved:
            self._save(data.shard, stream_state)

    def _train_round(self, batches: Any, *frozen: Any) -> bool:
        """Take one phase per fragment; return False if the island must stop before the end."""
        island, reports, waited = self._island, [], 0.0
        for phase in range(len(island.ledger.fragments)):
            waited += wait_for_merge(island, self._exchange, self._progress, self._give_up_after)
            self.gave_up = island.is_ahead or not island.has_model
            if island.must_stop() or self.gave_up:
                return False
            reports.append(island.train(batches, phase * self._parts.steps_per_sync, *frozen))
        self.done += 1
        if not self._has_told_lead:
            merged = island.status.merges // len(island.ledger.fragments)
            if note := describe_lead(self.done, merged, self._experiment.training.rounds):
                self._has_told_lead = True
                self._progress.note(note)
        self._log.add(self.done, _mean([report.metrics for report in reports]), waited)
        return True

    def _save(self, shard: int, stream_state: Any) -> None:
        self._log.flush()
        self._metrics.sync()
        ledger = self._island.ledger.to_json()
        position = {"stream": stream_state, "shard": shard, "ledger": ledger}
        state = self._island.state
        self._checkpoints.save(self.done, state, position, to_json(self._experiment))
        self._saved = self.done


def describe_lead(done: int, merged: int, rounds: int) -> str | None:
    """Tell that an island is far ahead of its syncer, whose rounds end the run; None: it is not."""
    if done < 10 or done < 2 * merged:
        return None
    return (
        f"its round {done} is far ahead of the syncer's round {merged}: the run ends with round "
        f"{rounds} of the syncer, but this island's learning-rate schedule with its own"
    )


def wait_for_merge(
    island: Island, exchange: SharedLink, progress: Progress, give_up_after: float
) -> float:
    """Wait until the island may take its next steps, or must stop; return the seconds of it."""
    began = noted = time.perf_counter()
    while not island.has_model or island.is_ahead:
        island.receive()
        if island.must_stop() or island.status.silent_seconds >= give_up_after:
            break
        island.send()
        exchange.wait(0.05)
        if time.perf_counter() - noted > SECONDS_BETWEEN_NOTES:
            noted = time.perf_counter()
            reason = "a merge" if island.status.shard is not None else "a free shard"
            if not island.status.connected:
                reason = "the syncer, which does not answer"
            progress.note(f"waiting for {reason}")
    return time.perf_counter() - began


@jax.jit
def _mean(metrics: list[Metrics]) -> Metrics:
    return jax.tree.map(lambda *values: sum(values) / len(values), *metrics)
