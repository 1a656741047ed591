"""The thread that sends a run's metrics to an experiment tracker, so that training never waits."""

import importlib
import json
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpax.checkpoints.checkpoint_files import lineage
from fedpax.console import print_error
from fedpax.errors import ArgumentError
from fedpax.extras import check_installed
from fedpax.files import explain_damage, read_json
from fedpax.run_files.configuration import to_json
from fedpax.run_files.paths import (
    CHECKPOINTS,
    CONFIGURATION,
    TRACKER,
    complete_rounds,
    write_atomically,
)
from fedpax.training.experiment import Experiment
from fedpax.training.tracked_runs import SERVICES, Description, RunOutcome, TrackedLine, TrackedRun

if sys.platform != "win32":
    import resource

SECONDS_BETWEEN_SENDS = 2.0
SECONDS_BETWEEN_FIGURES = 15.0
SECONDS_BETWEEN_ATTEMPTS = 30.0
SECONDS_AT_END = 30.0
SECONDS_FOR_CHECKPOINT = 600.0
"""The longest time at the end of a run until its newest checkpoint is sent."""

MOST_LINES = 20_000
"""The most lines that wait for a server; older ones are left out, and stay in `metrics.jsonl`."""
BATCH = 500


class TrackedPosition(NamedTuple):
    """What a tracker has of a run."""

    id: str | None = None  # the tracked run; None: there is none yet
    lines: int = 0
    last: Mapping[str, int] = {}  # the round of the last line that was sent, by the line's kind
    checkpoint: int = 0


class Tracker(AbstractContextManager["Tracker"]):
    """A thread that sends the lines of `metrics.jsonl` to a tracker."""

    # `tracker.json` has the tracked run's id and rounds: a later process sends no line twice.

    def __init__(
        self,
        tracker: str | None,
        folder: Path,
        *,
        exp: str,
        configuration: Any,
        note: Callable[[str], None],
        checkpoints_of: Path | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled and tracker is not None
        self.finished = False
        self._folder, self._note, self._checkpoints_of = folder, note, checkpoints_of
        if tracker is None and enabled:
            for name in _former_trackers(folder):
                note(
                    f"metrics are not sent to {name} any more. Give --training.tracker={name} to "
                    "continue the tracked run"
                )
        if not self.enabled:
            return
        assert tracker is not None
        self._name = tracker
        self._service = SERVICES[tracker]
        check_installed(tracker, f"--training.tracker={tracker}")
        self._description = Description(folder, exp, to_json(configuration))
        self._position = read_position(folder, tracker)
        self._last = dict(self._position.last)  # of the lines in the queue too
        self._queue: deque[tuple[float, Mapping[str, Any]]] = deque()
        self._lock = threading.Lock()
        self._left_out = 0
        self._closing = threading.Event()
        self._outcome: RunOutcome = "failed"
        self._uploading = self._has_ended = False
        self._run: TrackedRun | None = None
        self._error: Exception | None = None
        self._figures = SystemFigures()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)

    def __enter__(self) -> "Tracker":
        """Start the thread, which connects when there is something to send."""
        if self.enabled:
            self._thread.start()
        return self

    def add(self, line: Mapping[str, Any], kept: bool = False) -> None:
        """Queue a line, unless it has been sent."""
        if not self.enabled:
            return
        kind, number = line["kind"], line["round"]
        is_new = number > self._last.get(kind, -1)
        if not is_new and (kept or kind != "spike"):
            return
        self._last = _advance(self._last, line)
        with self._lock:
            self._queue.append((time.time(), line))
            if len(self._queue) > MOST_LINES:
                self._queue.popleft()
                self._left_out += 1

    def _work(self) -> None:
        if not self._closing.wait(SECONDS_BETWEEN_SENDS / 10):
            with suppress(Exception):  # takes seconds: while the round is compiled, not later
                importlib.import_module(self._name)
        while True:
            is_last = self._closing.wait(
                SECONDS_BETWEEN_SENDS if self._error is None else SECONDS_BETWEEN_ATTEMPTS
            )
            try:
                self._send_all()
            except Exception as error:
                if self._error is None:
                    self._tell(
                        f"{self._name} gets no metrics yet ({_shorten(error)}); the run continues, "
                        "and sends them later"
                    )
                self._error = error
                is_last = self._closing.is_set()
            else:
                if self._error is not None:
                    self._tell(f"{self._name} has got the metrics that waited")
                self._error = None
            if is_last:
                break
        if self._run is not None:
            try:
                self._run.close(self._outcome)
            except Exception as error:
                self._tell(f"{self._name}: {_shorten(error)}")
                self._error = error

    def _send_all(self) -> None:
        while self._queue:
            run = self._open_run()
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            try:
                self._send(run, batch)
            except Exception:
                with self._lock:
                    self._queue.extendleft(reversed(batch))
                raise
        if (number := self._checkpoint_to_send()) is not None:
            self._send_checkpoint(self._open_run(), number)

    def _open_run(self) -> TrackedRun:
        """Return the tracked run, which is opened when there is something to send."""
        if self._run is not None:
            return self._run
        id = self._position.id
        if id is None and self._name != "mlflow":  # MLflow's server chooses it
            name = re.sub(r"[^A-Za-z0-9_-]", "_", self._folder.name)[:40]
            id = f"{name}-{secrets.token_hex(4)}"
        run = self._run = self._service(id, self._description)
        self._save(self._position._replace(id=run.id))
        self._tell(f"metrics at {self._name}: {run.place}")
        return run

    def _send(self, run: TrackedRun, batch: list[tuple[float, Mapping[str, Any]]]) -> None:
        lines = list(batch)
        if figures := self._figures.due():
            seconds, line = lines[-1]
            lines.append((seconds, {"kind": "system", "round": line["round"], **figures}))
        position, first = self._position, self._position.lines
        run.log([TrackedLine(first + i, *line) for i, line in enumerate(lines)])
        for _, line in batch:
            position = position._replace(last=_advance(position.last, line))
            if line["kind"] == "spike":  # later checkpoints are deleted, and saved anew
                position = position._replace(checkpoint=min(position.checkpoint, line["round"]))
        self._save(position._replace(lines=first + len(lines)))

    def _checkpoint_to_send(self) -> int | None:
        """Return the round of the newest checkpoint, unless it has been sent."""
        if self._checkpoints_of is None:
            return None
        rounds = complete_rounds(self._checkpoints_of / CHECKPOINTS)[-1:]
        return rounds[0] if rounds and rounds[0] > self._position.checkpoint else None

    def _send_checkpoint(self, run: TrackedRun, number: int) -> None:
        assert self._checkpoints_of is not None
        # Links to its files: the run may delete the checkpoint meanwhile.
        draft = self._checkpoints_of / ".tracked"
        shutil.rmtree(draft, ignore_errors=True)
        self._uploading = True
        try:
            saved, copies = self._checkpoints_of / CHECKPOINTS, draft / CHECKPOINTS
            needed = [step for step, _ in lineage(saved, number)]
            for step in needed:
                shutil.copytree(saved / str(step), copies / str(step), copy_function=_link)
            if not {*needed} <= {*complete_rounds(copies)}:
                return  # a newer one has just replaced it
            shutil.copy(self._folder / CONFIGURATION, draft)
            run.log_checkpoint(draft, number)
        except shutil.Error:  # as above
            return
        finally:
            self._uploading = False
            shutil.rmtree(draft, ignore_errors=True)
        self._save(self._position._replace(checkpoint=number))

    def _tell(self, text: str) -> None:
        if not self._has_ended:
            self._note(text)

    def _save(self, position: TrackedPosition) -> None:
        self._position = position
        write_position(self._folder, self._name, position)

    def __exit__(self, error_class: type[BaseException] | None, *error: object) -> None:
        """Send the rest, for a limited time, and tell the user if something is left."""
        if not self.enabled:
            return
        if error_class is None:
            self._outcome = "finished" if self.finished else "interrupted"
        self._closing.set()
        self._thread.join(SECONDS_AT_END)
        deadline = time.monotonic() + SECONDS_FOR_CHECKPOINT
        while self._uploading and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(1.0)
        self._has_ended = True
        if self._thread.is_alive() or self._error is not None:
            remedy = "; the same command sends the rest" if self._queue else ""
            self._note(f"{self._name} has not got all metrics. They are in metrics.jsonl{remedy}")
        if self._left_out:
            self._note(
                f"{self._left_out} lines were not sent to {self._name}, because more than "
                f"{MOST_LINES} waited. They are in metrics.jsonl"
            )


def track(
    experiment: Experiment,
    folder: Path,
    exp: str,
    note: Callable[[str], None] | None = None,
    saved_in: Path | None = None,
    *,
    enabled: bool = True,
) -> Tracker:
    """Make the tracker that an experiment names, for a run in a folder."""
    training, name = experiment.training, exp or type(experiment).__name__
    return Tracker(
        training.tracker,
        folder,
        exp=exp,
        configuration=experiment,
        note=note or (lambda text: print_error(f"{name}: {text}")),
        checkpoints_of=(saved_in or folder) if training.track_checkpoints else None,
        enabled=enabled,
    )


class SystemFigures:
    """Figures of the process and its devices, from time to time."""

    def __init__(self) -> None:
        self._time, self._cpu = time.monotonic(), time.process_time()

    def due(self) -> dict[str, float]:
        """Return figures since the last ones; none before the time has come."""
        now, cpu = time.monotonic(), time.process_time()
        seconds = now - self._time
        if seconds < SECONDS_BETWEEN_FIGURES:
            return {}
        figures = {"cpu_cores": (cpu - self._cpu) / seconds}
        self._time, self._cpu = now, cpu
        if sys.platform != "win32":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            figures["host_peak_bytes"] = peak * (1 if sys.platform == "darwin" else 1024)
        devices = [device.memory_stats() or {} for device in jax.local_devices()]
        for name, key in (("device", "bytes_in_use"), ("device_peak", "peak_bytes_in_use")):
            if known := [float(device[key]) for device in devices if key in device]:
                figures[f"{name}_bytes"] = max(known)
        return figures


def read_position(folder: Path, tracker: str) -> TrackedPosition:
    """Read what a tracker has of a run, from `tracker.json`."""
    path = folder / TRACKER
    if not path.exists():
        return TrackedPosition()
    expectation = (
        "expected the id of the run's metrics at a tracker, as fedpax writes it. Restore it from a "
        "copy, or delete it to begin a new run at the tracker."
    )
    with explain_damage(path, expectation):
        entry = read_json(path).get(tracker)
        if entry is None:
            return TrackedPosition()
        position = TrackedPosition(**entry)
        numbers = [position.lines, position.checkpoint, *position.last.values()]
        whole = all(type(number) is int and number >= 0 for number in numbers)
        if not whole or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", position.id or ""):
            raise ArgumentError("its values are not those that fedpax writes")
        return position


def _former_trackers(folder: Path) -> list[str]:
    """Return the trackers in `tracker.json`, whose damage stops no run without a tracker."""
    with suppress(OSError, ValueError):
        return [name for name in SERVICES if name in read_json(folder / TRACKER)]
    return []


def write_position(folder: Path, tracker: str, position: TrackedPosition) -> None:
    """Write to `tracker.json` which part of a run a tracker has."""
    try:
        entries = dict(read_json(folder / TRACKER))
    except FileNotFoundError:
        entries = {}
    entries[tracker] = position._asdict()
    write_atomically(folder / TRACKER, json.dumps(entries) + "\n")


def _advance(last: Mapping[str, int], line: Mapping[str, Any]) -> dict[str, int]:
    """Return the last rounds by kind after a line; after a roll back, rounds are new again."""
    kind, number = line["kind"], line["round"]
    if kind == "spike":
        last = {known: min(at, number) for known, at in last.items()}
    return {**last, kind: number}


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
