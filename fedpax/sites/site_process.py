"""The folder, the files and the server that a process of a run over sites opens."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.saved_rounds import set_aside_after
from fedpax.preemption import PreemptionGuard
from fedpax.run_files.configuration import write_configuration
from fedpax.run_files.metrics import MetricsWriter
from fedpax.run_files.paths import CHECKPOINTS, refuse_checkpoint_dir, resolve_job_log_dir
from fedpax.training.experiment import Experiment
from fedpax.training.job_dir_lock import JobDirLock
from fedpax.training.process_agreement import check_agreement
from fedpax.training.progress import Progress
from fedpax.training.resume_checks import check_configuration
from fedpax.training.tracker import Tracker, track
from fedpax.transport.admission import Admission
from fedpax.transport.calls import DisconnectedError, Handler, WaitingError, serve

SECONDS_BETWEEN_NOTES = 10.0

SECONDS_TO_ASK_AGAIN = 15.0
"""Seconds for which a site whose run is finished asks whether the syncer has more rounds."""


class SyncerResult(NamedTuple):
    """The result of a syncer, of islands or of rounds over sites with data of their own.

    Attributes:
        rounds: completed rounds of the run. A round of islands has one merge per fragment.
        finished: whether all rounds are completed.
        signal: the signal that stopped the call, or None.
    """

    rounds: int
    finished: bool
    signal: signal.Signals | None


class JoinResult(NamedTuple):
    """The result of a site that has joined a syncer.

    Attributes:
        rounds: number of rounds of inner steps of this island, over all of its processes. For a
            site with data of its own, the rounds in which this process took part.
        finished: whether the syncer has done all rounds.
        signal: the signal that stopped the call, or None.
        gave_up: whether the call stopped because no syncer answered. If the run of the folder was
            finished before, `finished` is True too.
    """

    rounds: int
    finished: bool
    signal: signal.Signals | None
    gave_up: bool = False


@contextlib.contextmanager
def locked_folder(
    experiment: Experiment,
    job_log_dir: str | Path,
    command: Literal["syncer", "join"],
    exp: str,
    allow_config_change: Collection[str],
) -> Iterator[Path]:
    """Lock the folder of a process, and check that it belongs to the experiment."""
    folder = resolve_job_log_dir(job_log_dir)
    refuse_checkpoint_dir(experiment.training.checkpoint_dir, command)
    # The number of rounds is the syncer's.
    rounds = ("training.rounds",) if command == "join" else ()
    with JobDirLock(folder):
        check_agreement(folder, experiment)
        changes = (*allow_config_change, *rounds)
        check_configuration(folder, experiment, exp, allow_config_change=changes)
        yield folder


def open_progress(
    experiment: Experiment,
    exp: str,
    done: int,
    island: str = "",
    *,
    item_unit: str = "examples",
    enabled: bool = True,
) -> Progress:
    """Return the progress of a run, by the names of the experiment and of an island."""
    name = exp or type(experiment).__name__
    return Progress(
        f"{name} {island}" if island else name,
        rounds_done=done,
        rounds=experiment.training.rounds,
        item_unit=item_unit,
        enabled=enabled,
    )


class ServerFiles(NamedTuple):
    """The files that a syncer writes, and the signals that stop it."""

    tracker: Tracker
    metrics: MetricsWriter
    checkpoints: Checkpoints
    progress: Progress
    preemption: PreemptionGuard

    def result(self, rounds: int, finished: bool) -> SyncerResult:
        """Return the result of the call, and tell the tracker."""
        self.tracker.finished = finished
        return SyncerResult(rounds, finished, None if finished else self.preemption.signal)


@contextlib.contextmanager
def serving(
    experiment: Experiment,
    folder: Path,
    exp: str,
    handler: Handler,
    listen: str,
    admission: Admission,
    *,
    done: int,
    item_unit: str = "examples",
    **settings: Any,
) -> Iterator[ServerFiles]:
    """Open a syncer's files after `done` rounds, and serve sites, with settings of `serve`."""
    write_configuration(folder, experiment, exp)
    # The user can have restored an older copy of the state.
    set_aside_after(folder / CHECKPOINTS, done)
    with (
        track(experiment, folder, exp) as tracker,
        MetricsWriter(folder, after=done, listener=tracker.add) as metrics,
        Checkpoints(folder, keep=experiment.training.keep_checkpoints) as checkpoints,
        open_progress(experiment, exp, done, item_unit=item_unit) as progress,
        serve(handler, listen, admission=admission, **settings) as server,
        PreemptionGuard() as preemption,
    ):
        address = f"{listen.rpartition(':')[0]}:{server.port}"
        progress.note(f"listening at {address}; folder {folder}")
        yield ServerFiles(tracker, metrics, checkpoints, progress, preemption)


def patience(progress: Progress) -> Callable[[DisconnectedError], None]:
    """Return a function that prints, at most every 10 seconds, why a site waits."""
    noted = -math.inf

    def note(error: DisconnectedError) -> None:
        nonlocal noted
        if time.monotonic() - noted > SECONDS_BETWEEN_NOTES:
            noted = time.monotonic()
            waits = isinstance(error, WaitingError)
            progress.note(f"waiting: {error}" if waits else f"waiting for the syncer at {error}")

    return note
