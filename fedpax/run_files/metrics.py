"""The metrics of a run: one JSON object per line in `metrics.jsonl`, and TensorBoard scalars."""

import itertools
import json
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary
from tensorboardX.record_writer import RecordWriter

from fedpax.console import print_error
from fedpax.files import append_to, open_unlinked
from fedpax.run_files.goodput import BUCKETS
from fedpax.run_files.line_files import name_lines, read_chunks, read_ranges, replace_by
from fedpax.run_files.metrics_log import (
    SUMS_REMEMBERED,
    MetricsLog,
    Sum,
    all_lines,
    last_rounds,
    read_log,
    read_sums,
    spread_rounds,
    write_sums,
)
from fedpax.run_files.paths import METRICS, SCALARS

TIMINGS = frozenset(
    {"seconds", "items_per_second", "input_wait_fraction", "mfu", "wall_seconds"}
    | {f"{bucket}_seconds" for bucket in BUCKETS}
)
"""Metrics that differ between two runs of one configuration: timings. All others are equal."""

RESERVED_METRICS = TIMINGS.union(
    ("kind", "round", "items", "bytes_across_placement", "update_norm"),
    ("spikes", "skipped_rounds", "non_finite_rounds"),
)
"""The keys that the training loop adds to each line of `metrics.jsonl`."""

OF_SITE = "site/"
"""Before the metrics of one site of several, `site/NAME/loss`: they are shown by name alone."""

SECONDS_BETWEEN_FLUSHES = 30.0
SCALAR_ROUNDS = 2000
"""Least number of rounds whose scalars a run that resumes on another machine writes again."""


def read_metrics(job_log_dir: str | Path) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl`.

    The kinds are `run` (the first line), `training`, `evaluation` and `spike` (one per roll back).
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
    return read_log(job_log_dir, all_lines).lines


def describe_damage(
    job_log_dir: str | Path, saved: int, log: MetricsLog | None = None
) -> list[str]:
    """Describe the lines of `metrics.jsonl` that are damaged, and those that are missing."""
    log = read_log(job_log_dir, last_rounds) if log is None else log
    path, sentences = Path(job_log_dir) / METRICS, []
    if log.damaged:
        left_out = "are left out" if len(log.damaged) > 1 else "is left out"
        sentences.append(f"{path}: {name_lines(log.damaged)} cannot be read and {left_out}.")
    last = max((line["round"] for line in select(log.lines, "training")), default=0)
    if last < saved:
        sentences.append(
            f"{path} ends at round {last}, expected round {saved}, which is saved: the results of "
            "later rounds are missing. Restore the file from a copy."
        )
    return sentences


def select(lines: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Return the lines of one kind.

    Example:
        >>> select([{"kind": "run"}, {"kind": "training", "round": 1}], "training")
        [{'kind': 'training', 'round': 1}]
    """
    return [line for line in lines if line["kind"] == kind]


def throughput(rounds: Iterable[Mapping[str, Any]]) -> float:
    """Return the items per second of all rounds together."""
    known = [line for line in rounds if line.get("seconds") and line.get("items_per_second")]
    items = sum(line["seconds"] * line["items_per_second"] for line in known)
    return items / sum(line["seconds"] for line in known) if known else math.nan


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """A writer that appends to `metrics.jsonl` and to TensorBoard's files."""

    # Resuming after round r drops later lines: but for `TIMINGS`, the file equals that of an
    # uninterrupted run.

    def __init__(
        self,
        job_log_dir: str | Path,
        *,
        after: int = 0,
        enabled: bool = True,
        listener: Callable[[Mapping[str, Any], bool], None] | None = None,
    ) -> None:
        def keep(line: Mapping[str, Any]) -> bool:
            # The line of round 0 describes the run; a new run writes its own. Roll backs stay.
            return line["round"] <= after and (after > 0 or line["kind"] == "spike")

        folder = Path(job_log_dir)
        log = read_log(folder, last_rounds, after=after, keep=keep)
        self.kept, self._ranges, self._sum = log.lines, log.kept, log.sum
        self._folder, self._after, self._enabled = folder, after, enabled
        self._listener = listener
        if enabled and log.damaged and after > 0:
            print_error(
                f"{folder / METRICS}: {name_lines(log.damaged)} cannot be read (expected a JSON "
                "object with kind, round and numbers) and will be removed; all other lines are "
                "kept."
            )

    def __enter__(self) -> "MetricsWriter":
        """Open the files. Before this the folder is not changed."""
        if not self._enabled:
            return self
        folder, after = self._folder, self._after
        (folder / SCALARS).mkdir(parents=True, exist_ok=True)
        self._drop_lines()
        self._file = append_to(folder / METRICS)
        # Not tensorboardX's SummaryWriter: its thread dies with a traceback when the disk is full.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.after{after}"
        is_first = not any((folder / SCALARS).iterdir())
        (folder / SCALARS / name).unlink(missing_ok=True)
        self._events = RecordWriter(str(folder / SCALARS / name))
        self._add_event(0, file_version="brain.Event:2")
        self._add_event(after + 1, session_log=SessionLog(status=SessionLog.START))
        if is_first and self.kept:  # the lines are of another machine
            for line in read_log(folder, lambda: spread_rounds(SCALAR_ROUNDS)).lines:
                numbers = {k: v for k, v in line.items() if isinstance(v, int | float)}
                del numbers["round"]
                self._add_scalars(line["kind"], line["round"], numbers)
        self._flushed = time.monotonic()
        if self._listener is not None:
            for line in self.kept:
                self._listener(line, True)
        return self

    def _drop_lines(self) -> None:
        """Leave the kept lines alone in the file. A link in its place is replaced."""
        path, end = self._folder / METRICS, self._sum.bytes
        sums = [known for known in read_sums(self._folder) if known.bytes <= end]
        is_start = self._ranges in ([], [(0, end)])
        sums = sums if is_start else []
        if not (is_start and path.exists() and _shorten(path, end)):
            replace_by(path, read_ranges(path, self._ranges))
        self._sums = sums

    def write(
        self,
        kind: str,
        round_number: int,
        values: Mapping[str, float | str],
        vectors: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write one line, and each number as the TensorBoard scalar `kind/name`."""
        # JSON has no NaN and no infinity.
        if not self._enabled:
            return
        line = {"kind": kind, "round": round_number, **_json_values(values)}
        self._append(line)
        self._add_scalars(kind, round_number, values)
        for name, vector in (vectors or {}).items():
            entry = Summary.Value(tag=f"{kind}/{name}", histo=_histogram(vector))
            self._add_event(round_number, summary=Summary(value=[entry]))
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self._events.flush()
            self._flushed = time.monotonic()

    def write_sizes(
        self,
        num_parameters: int,
        num_participants: int,
        item_unit: str,
        items_per_round: int,
        **more: float,
    ) -> None:
        """Write the line of kind `run`, the first of the file, unless it is there."""
        if not self._enabled or select(self.kept, "run"):
            return
        sizes: dict[str, float | str] = {
            "num_parameters": num_parameters,
            "num_participants": num_participants,
            "item_unit": item_unit,
            "items_per_round": items_per_round,
        }
        line = {"kind": "run", "round": 0, **_json_values(sizes | more)}
        path, text = self._folder / METRICS, json.dumps(line) + "\n"
        if not self._sum.bytes:
            self._append(line)
        else:  # an earlier process has written this line, and it was lost
            self._file.close()
            crc = zlib.crc32(text.encode())
            for chunk in read_chunks(path):
                crc = zlib.crc32(chunk, crc)
            replace_by(path, itertools.chain([text.encode()], read_chunks(path)))
            self._sum = Sum(self._sum.bytes + len(text), crc, self._sum.round)
            self._sums = []
            self._file = append_to(path)
            if self._listener is not None:
                self._listener(line, True)
        self.kept.insert(0, line)
        self._add_scalars("run", 0, sizes)

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        self._file.write(text)
        self._file.flush()
        size, crc, last_round = self._sum
        self._sum = Sum(
            size + len(text), zlib.crc32(text.encode(), crc), max(last_round, line["round"])
        )
        if self._listener is not None:
            self._listener(line, False)

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
        """Wait until the lines are on the disk: a checkpoint must not be newer than the lines."""
        if self._enabled:
            os.fsync(self._file.fileno())
            self._events.flush()
            self._sums = [*self._sums, self._sum][-SUMS_REMEMBERED:]
            write_sums(self._folder, self._sums)

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        """Close the files. An error in closing must not hide the error that ends the run."""
        if not self._enabled:
            return
        for file in (self._file, self._events):
            try:
                file.close()
            except OSError:
                if error_type is None:
                    raise


def _shorten(path: Path, size: int) -> bool:
    """Shorten a file in its place; return False where the file system or a link prevents it."""
    try:
        file = open_unlinked(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.ftruncate(file, size)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _histogram(vector: np.ndarray) -> HistogramProto:
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


# ---- quantiles of metrics that have a value for each participant

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""The ends of the names in `metrics.jsonl`, and the quantiles that they stand for."""


def is_vector(value: Any) -> bool:
    """Return whether a metric has a value for each participant, and is not one number."""
    return np.ndim(value) == 1 and np.size(value) != 1


def with_quantiles(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each vector by quantiles of its finite values, such as `accuracy/p10`."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        if not is_vector(value):
            named[name] = value
            continue
        known = finite_values(value)
        for end, quantile in QUANTILES.items():
            exact = float(np.quantile(known, quantile)) if known.size else np.nan
            named[f"{name}/{end}"] = round(exact, 12)
    return named


def finite_values(values: Any) -> np.ndarray:
    """Return the finite values of a vector, as float64."""
    wide = np.asarray(values, np.float64)
    return wide[np.isfinite(wide)]
