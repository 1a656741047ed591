"""The process of a syncer."""

import contextlib
import queue
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.islands.fragment_format import largest_fragment
from fedpax.islands.method_parts import build_parts, parts_of, tokens_per_step
from fedpax.islands.syncer.island_table import IslandWatch
from fedpax.islands.syncer.logs import RoundLog, read_merges
from fedpax.islands.syncer.members import FREE_SHARD_AFTER
from fedpax.islands.syncer.merge_report import MergeReport, Totals
from fedpax.islands.syncer.merge_votes import NO_GUARDS, GuardedMerges, GuardRules
from fedpax.islands.syncer.outer_model import FragmentState, OuterModel
from fedpax.islands.syncer.syncer import Syncer
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.parallel.mesh import SINGLE_DEVICE
from fedpax.preemption import PreemptionGuard
from fedpax.run_files.configuration import to_json
from fedpax.run_files.metrics import MetricsWriter, with_quantiles
from fedpax.run_files.paths import latest_round
from fedpax.sites.site_process import SyncerResult, end_serving, identify, locked_folder, serving
from fedpax.training.experiment import Experiment, Run
from fedpax.training.progress import Progress
from fedpax.transport.admission import NO_LIMITS, Admission, SiteLimits

SECONDS_BETWEEN_TICKS = 0.02

_Reports = queue.SimpleQueue[tuple[MergeReport, Sequence[FragmentState]]]


class SyncerState(NamedTuple):
    """The content of a syncer's checkpoints, for `fedpax evaluate`, `generate` and `export`."""

    params: Params


def run_syncer(
    experiment: Experiment,
    job_log_dir: str | Path,
    listen: str,
    *,
    exp: str = "",
    certificates: str | Path | None = None,
    allow_config_change: Collection[str] = (),
    heartbeat_seconds: float = 1.0,
    free_shard_after: float = FREE_SHARD_AFTER,
    islands_per_certificate: int = 1,
    goodbye_seconds: float = 60.0,
    allow_older_state: bool = False,
    limits: SiteLimits = NO_LIMITS,
    guards: GuardRules = NO_GUARDS,
) -> SyncerResult:
    """Serve the outer model of an experiment to islands, until all of its merges are done.

    No accelerator is needed. Each merge is saved before an island receives it: a killed syncer
    resumes after its last merge. The folder gets `config.json`, `metrics.jsonl`, `tensorboard/`,
    `merges.jsonl`, `islands.json`, `syncer/` and `checkpoints/` (the outer model).

    At the end, the syncer answers until each island knows it, for up to `goodbye_seconds`.

    Args:
        experiment: the experiment.
        job_log_dir: the run's folder.
        listen: `HOST:PORT`; without certificates a loopback address.
        exp: the experiment's name on the command line, recorded in `config.json`.
        certificates: the folder of this site's certificate. Default None: no encryption.
        allow_config_change: as in `fedpax.training.trainer.train`.
        heartbeat_seconds: seconds between an island's heartbeats. Default 1.0.
        free_shard_after: seconds without a message of an island after which another island can
            take its shard. Default 1800.0.
        islands_per_certificate: the most islands of one certificate. Default 1.
        goodbye_seconds: seconds after the end in which islands can learn it. Default 60.0.
        allow_older_state: whether the run may continue from a state older than `merges.jsonl`, such
            as a restored copy. Default False.
        limits: what each site may send. Default: no limit; malformed messages mute a site, and
            expel it in the end.
        guards: which updates are dropped before a merge. Default: none.

    Returns:
        The number of completed rounds, and the signal that stopped the call.

    Raises:
        ConfigurationError: the folder holds another configuration, or another process uses it; or
            the method cannot be divided into parts; or `expelled.json` is damaged.
        DamagedStateError: the saved state is damaged, missing, or not the newest one.
        NonFiniteError: a merge made a parameter NaN or infinite.
        OSError: the state cannot be saved, or the address is in use.
        ValueError: the address is malformed, or certificates are missing or cannot be used.
    """
    guards.check()
    with locked_folder(experiment, job_log_dir, "syncer", exp, allow_config_change) as folder:
        rounds, checkpoint = experiment.training.rounds, latest_round(folder) or 0
        store = SyncerStore(folder, allow_older=allow_older_state)
        store.check_presence()
        run = build_parts(experiment, SINGLE_DEVICE, exp)
        parts, params = parts_of(run), _initial_params(run, experiment)
        model = OuterModel(parts, params)
        admission = Admission(folder, limits)
        reports: _Reports = queue.SimpleQueue()
        phases = len(model.fragments)
        syncer = Syncer(
            parts,
            model,
            identify(experiment, params),
            num_merges=rounds * phases,
            tokens_per_step=tokens_per_step(run, parts, phases),
            store=store,
            heartbeat_seconds=heartbeat_seconds,
            free_shard_after=free_shard_after,
            islands_per_certificate=islands_per_certificate,
            is_expelled=admission.is_expelled,
            on_merge=lambda report: reports.put((report, list(model.fragments))),
            guard=GuardedMerges(guards, phases, _evaluation(run)),
        )
        first = syncer.merges // phases
        with (
            contextlib.closing(store),
            serving(
                experiment,
                folder,
                exp,
                syncer.handle,
                listen,
                admission,
                done=first,
                item_unit=run.item_unit,
                certificates=certificates,
                max_message_bytes=largest_fragment(model.formats),
                max_calls=max(128, 4 * parts.islands),  # an island has up to two at a time
            ) as (files, preemption),
        ):
            progress, metrics = files.progress, files.metrics
            if every := experiment.training.evaluate_every:
                progress.note(
                    f"training.evaluate_every={every} has no effect: a syncer and its islands "
                    f"do not evaluate. `fedpax evaluate --job_log_dir={folder}` does"
                )
            if syncer.merges:
                progress.note(f"resuming after merge {syncer.merges} of {rounds * phases}")
            size = sum(leaf.size for leaf in jax.tree.leaves(params))
            metrics.write_sizes(size, parts.islands, run.item_unit, run.items_per_round)
            log = RoundLog(metrics, progress, phases, syncer.totals)
            log.restore(read_merges(folder), syncer.totals)
            merged = _MergedRounds(experiment, model, metrics, files.checkpoints, log, first)
            if min(checkpoint, first) < first == rounds:
                merged.save(model.fragments)  # it was killed after the last merge
            watch = IslandWatch(folder, progress)
            _merge_rounds(syncer, reports, merged, watch, preemption)
            if merged.finished:
                files.checkpoints.wait()  # the outer model is there when islands learn the end
                _say_goodbye(syncer, progress, preemption, goodbye_seconds)
            watch.update(syncer.islands(), force=True)
            return end_serving(files, preemption, merged.done, syncer.finished)


def _initial_params(run: Run, experiment: Experiment) -> Params:
    """Return the parameters from which the run begins, in the host's memory."""
    with jax.set_mesh(run.mesh):
        if run.initial is not None:
            return jax.device_get(run.initial.load())
        return jax.device_get(jax.jit(run.init)(jax.random.key(experiment.training.seed)))


def _evaluation(run: Run) -> Callable[[Params], dict[str, float]]:
    """Return the metrics of a model on the syncer's held-out data."""

    def evaluate(params: Params) -> dict[str, float]:
        with jax.set_mesh(run.mesh):
            metrics = with_quantiles(run.evaluate(params))
        return {name: float(np.asarray(value)) for name, value in metrics.items()}

    return evaluate


class _MergedRounds:
    """The rounds that are merged: their metrics, and the checkpoints of the outer model."""

    def __init__(
        self,
        experiment: Experiment,
        model: OuterModel,
        metrics: MetricsWriter,
        checkpoints: Checkpoints,
        log: RoundLog,
        done: int,
    ) -> None:
        self._experiment, self._model = experiment, model
        self._metrics, self._checkpoints, self._log = metrics, checkpoints, log
        self.done = done

    @property
    def finished(self) -> bool:
        return self.done >= self._experiment.training.rounds

    def add(self, report: MergeReport, fragments: Sequence[FragmentState], totals: Totals) -> None:
        """Log a merge, and save the model after the last one of a round, if it is due."""
        self._log.add(report, totals)
        if report.merge % len(fragments) == 0:
            self.done = report.merge // len(fragments)
            every = self._experiment.training.checkpoint_every
            if self.finished or (every and self.done % every == 0):
                self.save(fragments)

    def save(self, fragments: Sequence[FragmentState]) -> None:
        """Save the outer model."""
        self._metrics.sync()
        state = SyncerState(self._model.params(fragments))
        self._checkpoints.save(self.done, state, {}, to_json(self._experiment))


def _merge_rounds(
    syncer: Syncer,
    reports: _Reports,
    merged: _MergedRounds,
    watch: IslandWatch,
    preemption: PreemptionGuard,
) -> None:
    """Merge until all rounds are done, or a signal asks to stop."""
    while preemption.signal is None:
        syncer.advance()
        while not reports.empty():
            merged.add(*reports.get(), syncer.totals)
        watch.update(syncer.islands())
        if syncer.failure is not None:
            raise syncer.failure
        if merged.finished:
            break
        time.sleep(SECONDS_BETWEEN_TICKS)


def _say_goodbye(
    syncer: Syncer, progress: Progress, preemption: PreemptionGuard, seconds: float
) -> None:
    """Answer islands until each of them knows the end of the run, at most for `seconds`."""
    deadline, noted = time.monotonic() + seconds, False
    while time.monotonic() < deadline and preemption.signal is None:
        if syncer.everyone_heard_end:
            break
        if not noted:
            progress.note(f"finished; islands can learn it for {seconds:g} s")
        noted = True
        time.sleep(SECONDS_BETWEEN_TICKS)
