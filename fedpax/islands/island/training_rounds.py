"""The rounds of an island that has joined: inner steps, waits for merges, metrics, checkpoints."""

import time
from typing import Any

import jax

from fedpax.algorithm import AlgorithmParts, Metrics
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.islands.island.island import Island
from fedpax.islands.island.island_data import ShardPrefetch
from fedpax.islands.island.island_log import IslandLog
from fedpax.islands.island.shared_link import SharedLink
from fedpax.run_files.configuration import to_json
from fedpax.run_files.metrics import MetricsWriter
from fedpax.sites.site_process import SECONDS_BETWEEN_NOTES
from fedpax.training.experiment import Experiment
from fedpax.training.progress import Progress

SECONDS_TO_FLUSH = 5.0


class TrainingRounds:
    """The rounds of an island, from round `done` on."""

    def __init__(
        self,
        experiment: Experiment,
        parts: AlgorithmParts,
        island: Island,
        exchange: SharedLink,
        *,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        progress: Progress,
        log: IslandLog,
        done: int,
        give_up_after: float,
    ) -> None:
        self._experiment, self._parts = experiment, parts
        self._island, self._exchange = island, exchange
        self._checkpoints, self._metrics = checkpoints, metrics
        self._progress, self._log = progress, log
        self._give_up_after = give_up_after
        self.done = self._saved = done
        self.gave_up = False  # because no syncer answers

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
