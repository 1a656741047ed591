"""The metrics of a run: one JSON object per line in `metrics.jsonl`, and TensorBoard scalars."""

import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary
from tensorboardX.record_writer import RecordWriter

from fedpax.console import print_error
from fedpax.files import append_to
from fedpax.run_files.goodput import BUCKETS
from fedpax.run_files.json_lines import name_lines, read_json_lines
from fedpax.run_files.paths import METRICS, SCALARS, write_atomically
from fedpax.run_files.quantiles import finite_values

TIMINGS = frozenset(
    {"seconds", "items_per_second", "input_wait_fraction", "mfu", "wall_seconds"}
    | {f"{bucket}_seconds" for bucket in BUCKETS}
)
"""Metrics that differ between two runs of one configuration: timings. All others are equal."""


SECONDS_BETWEEN_FLUSHES = 30.0


def read_metrics(job_log_dir: str | Path) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl`.

    Each line has `"kind"` and `"round"`. The kinds are `run` (the first line: sizes of the model
    and of a round), `training` (one per round), `evaluation` and `spike` (one per roll back).
    Damaged lines are left out.

    Args:
        job_log_dir: a run's folder.

    Returns:
        The lines; none if there is no file.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with MetricsWriter(folder) as metrics:
        ...     metrics.write("training", 1, {"loss": 2.5})
        >>> read_metrics(folder)
        [{'kind': 'training', 'round': 1, 'loss': 2.5}]
    """
    return _read(job_log_dir)[0]


def describe_damage(job_log_dir: str | Path, saved: int) -> list[str]:
    """Describe the lines of `metrics.jsonl` that are damaged, and those that are missing.

    Args:
        job_log_dir: a run's folder.
        saved: the round of its newest checkpoint, before which its lines were written; 0 if there
            is none.

    Returns:
        Sentences; none if the file is whole.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    lines, damaged = _read(job_log_dir)
    path, found = Path(job_log_dir) / METRICS, []
    if damaged:
        left_out = "are left out" if len(damaged) > 1 else "is left out"
        found.append(f"{path}: {name_lines(damaged)} cannot be read and {left_out}.")
    last = max((line["round"] for line in select(lines, "training")), default=0)
    if last < saved:
        found.append(
            f"{path} ends at round {last}, expected round {saved}, which is saved: the results of "
            "later rounds are missing. Restore the file from a copy."
        )
    return found


def select(lines: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Return the lines of one kind.

    Example:
        >>> select([{"kind": "run"}, {"kind": "training", "round": 1}], "training")
        [{'kind': 'training', 'round': 1}]
    """
    return [line for line in lines if line["kind"] == kind]


def throughput(rounds: Iterable[Mapping[str, Any]]) -> float:
    """Return the items per second of all rounds together.

    Args:
        rounds: the lines of kind `training`; a line without its two rates is left out.

    Returns:
        The mean, weighted by time; NaN without a line.

    Example:
        >>> throughput([{"seconds": 1.0, "items_per_second": 9.0},
        ...             {"seconds": 2.0, "items_per_second": 6.0}])
        7.0
    """
    known = [line for line in rounds if line.get("seconds") and line.get("items_per_second")]
    items = sum(line["seconds"] * line["items_per_second"] for line in known)
    return items / sum(line["seconds"] for line in known) if known else math.nan


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """A writer that appends to `metrics.jsonl` and to TensorBoard's files; a context manager.

    On entering, a run that resumes after round r drops the lines of later rounds. In the end the
    file equals that of an uninterrupted run apart from `TIMINGS`. TensorBoard hides the same
    rounds.

    Args:
        job_log_dir: the run's folder.
        after: the round of the checkpoint from which the run resumes; 0 for a new run.
        enabled: False writes nothing; with several processes only one writes.

    Attributes:
        kept: the lines of earlier processes that stay in the file.
    """

    def __init__(self, job_log_dir: str | Path, *, after: int = 0, enabled: bool = True) -> None:
        folder = Path(job_log_dir)
        lines, damaged = _read(folder)
        # The line of round 0 describes the run; a new run writes its own. Roll backs stay.
        self.kept = [
            line for line in lines if line["round"] <= after and (after or line["kind"] == "spike")
        ]
        self._folder, self._after, self._enabled = folder, after, enabled
        if enabled and damaged and after > 0:
            print_error(
                f"{folder / METRICS}: {name_lines(damaged)} cannot be read (expected a JSON object "
                "with kind, round and numbers) and will be removed; all other lines are kept."
            )

    def __enter__(self) -> "MetricsWriter":
        """Open the files. Before this the folder is not changed."""
        if not self._enabled:
            return self
        folder, after = self._folder, self._after
        path = folder / METRICS
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.kept))
        self._file = append_to(path)
        # Not tensorboardX's SummaryWriter: its thread dies with a traceback when the disk is full.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.after{after}"
        (folder / SCALARS).mkdir(exist_ok=True)
        is_first = not any((folder / SCALARS).iterdir())
        (folder / SCALARS / name).unlink(missing_ok=True)
        self._events = RecordWriter(str(folder / SCALARS / name))
        self._add_event(0, file_version="brain.Event:2")
        self._add_event(after + 1, session_log=SessionLog(status=SessionLog.START))
        if is_first:  # the lines are of another machine
            for line in self.kept:
                numbers = {k: v for k, v in line.items() if isinstance(v, int | float)}
                del numbers["round"]
                self._add_scalars(line["kind"], line["round"], numbers)
        self._flushed = time.monotonic()
        return self

    def write(
        self,
        kind: str,
        round_number: int,
        values: Mapping[str, float | str],
        vectors: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write one line, and each number as the TensorBoard scalar `kind/name`.

        A number that is not finite is written as `null`, because JSON has no NaN and no infinity.

        Args:
            kind: `"run"`, `"training"`, `"evaluation"` or `"spike"`.
            round_number: the round after which the values were measured.
            values: numbers and texts by name.
            vectors: values of all participants by name, which become TensorBoard's histograms.
                Default None: there are none.

        Raises:
            OSError: the line cannot be written, for example because the disk is full.
        """
        if not self._enabled:
            return
        line = {"kind": kind, "round": round_number, **_json_values(values)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._add_scalars(kind, round_number, values)
        for name, vector in (vectors or {}).items():
            entry = Summary.Value(tag=f"{kind}/{name}", histo=_histogram(vector))
            self._add_event(round_number, summary=Summary(value=[entry]))
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self._events.flush()
            self._flushed = time.monotonic()

    def write_sizes(self, sizes: Mapping[str, float | str]) -> None:
        """Write the line of kind `run`, the first of the file, unless the file has it already.

        Args:
            sizes: sizes of the model and of a round, by name.

        Raises:
            OSError: the line cannot be written, for example because the disk is full.
        """
        if not self._enabled or select(self.kept, "run"):
            return
        path = self._folder / METRICS
        self._file.close()
        # Where lines are kept, an earlier process has written this line, and it was lost.
        self.kept.insert(0, {"kind": "run", "round": 0, **_json_values(sizes)})
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.kept))
        self._file = append_to(path)
        self._add_scalars("run", 0, sizes)

    def _add_scalars(self, kind: str, round_number: int, values: Mapping[str, float | str]) -> None:
        for key, value in values.items():
            if not isinstance(value, str):
                # Not tensorboardX's `scalar`, which warns of each number that is not finite.
                entry = Summary.Value(tag=f"{kind}/{key}", simple_value=float(value))
                self._add_event(round_number, summary=Summary(value=[entry]))

    def _add_event(self, step: int, **content: Any) -> None:
        event = Event(wall_time=time.time(), step=step, **content)
        self._events.write(event.SerializeToString())

    def sync(self) -> None:
        """Wait until the lines are on the disk: a checkpoint must not be newer than the lines.

        Raises:
            OSError: the lines cannot be written, for example because the disk is full.
        """
        if self._enabled:
            os.fsync(self._file.fileno())
            self._events.flush()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the files. An error in closing must not hide the error that ends the run."""
        if not self._enabled:
            return
        for file in (self._file, self._events):
            try:
                file.close()
            except OSError:
                if kind is None:
                    raise


def _read(job_log_dir: str | Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the whole lines of `metrics.jsonl`, and the numbers of the damaged ones, from 1."""
    path = (job_log_dir if isinstance(job_log_dir, PurePath) else Path(job_log_dir)) / METRICS
    return read_json_lines(
        path,
        _is_whole,
        "expected the file that `fedpax train` writes. Move it away to train on without the "
        "earlier metrics, or restore it.",
    )


def _is_whole(line: Any) -> bool:
    """Return whether a JSON value is a line of the file; only one of kind `run` has texts."""
    if not isinstance(line, dict) or type(line.get("round")) is not int:
        return False
    kind = line.get("kind")
    texts = {"kind", "item_unit"} if kind == "run" else {"kind"}
    return isinstance(kind, str) and all(
        isinstance(value, str) if name in texts else value is None or is_number(value)
        for name, value in line.items()
    )


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number that arithmetic on floats can take."""
    return isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max


def _histogram(vector: np.ndarray) -> HistogramProto:
    """Count the finite values of a vector in 30 intervals of equal length."""
    known = finite_values(vector)
    counts, edges = np.histogram(known, bins=30)
    return HistogramProto(
        min=known.min(initial=edges[-1]),
        max=known.max(initial=edges[0]),
        num=known.size,
        sum=known.sum(),
        sum_squares=np.square(known).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )


def _json_values(values: Mapping[str, float | str]) -> dict[str, float | str | None]:
    """Replace NaN and infinities, which JSON does not have, by None."""
    return {k: v if isinstance(v, str) or math.isfinite(v) else None for k, v in values.items()}
