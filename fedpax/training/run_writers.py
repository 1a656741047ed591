"""The writers of a run's files: its notes, metrics and checkpoints, and those of a tracker."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.orbax_files import Retention
from fedpax.run_files.metrics import MetricsWriter
from fedpax.training.experiment import Experiment
from fedpax.training.progress import Progress, open_progress
from fedpax.training.tracker import Tracker, track


class RunFiles(NamedTuple):
    """The files that a process writes, from its start to its end."""

    progress: Progress
    tracker: Tracker
    checkpoints: Checkpoints
    metrics: MetricsWriter  # not open yet: a run that cannot train does not change its folder


@contextlib.contextmanager
def open_files(
    experiment: Experiment,
    folder: Path,
    exp: str,
    done: int,
    item_unit: str,
    island: str = "",
    *,
    enabled: bool = True,
    saved_in: Path | None = None,
    **saving: Any,
) -> Iterator[RunFiles]:
    """Open the files of a run after `done` rounds; later metrics are dropped."""
    training = experiment.training
    roll_back_to = training.checkpoint_every if training.on_spike == "roll_back" else 0
    scheduled = (roll_back_to, training.export_every)
    keep = Retention(training.keep_checkpoints, every=training.keep_every, scheduled=scheduled)
    progress = open_progress(experiment, exp, done, island, item_unit=item_unit, enabled=enabled)
    with (
        progress,
        # Closed after the checkpoints, so that it can send the last one.
        track(experiment, folder, exp, progress.note, saved_in, enabled=enabled) as tracker,
        Checkpoints(saved_in or folder, keep=keep, **saving) as checkpoints,
    ):
        metrics = MetricsWriter(folder, after=done, enabled=enabled, listener=tracker.add)
        yield RunFiles(progress, tracker, checkpoints, metrics)
