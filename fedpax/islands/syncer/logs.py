"""The logs of a syncer: a line for each merge with all its updates, and the metrics of rounds."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpax.console import print_error
from fedpax.files import append_to
from fedpax.islands.syncer.merge_report import MergeReport, Totals, read_report
from fedpax.run_files.line_files import name_lines, read_json_lines
from fedpax.run_files.metrics import MetricsWriter, select
from fedpax.run_files.paths import write_atomically
from fedpax.training.progress import Progress

MERGES_FILE = "merges.jsonl"


def read_merges(job_log_dir: str | Path) -> list[dict[str, Any]]:
    """Read the merges of a syncer's run, without the damaged lines of a killed one."""
    # Fields: `merge` (its number, from 1), `fragment`, `time` (seconds since 1970), `loss`, `late`,
    # `staleness`, `metrics` (as in `MergeReport`), `record` (the identifier of the syncer's state
    # after the merge) and `updates`, each with `island`, `incarnation` (its process), `sequence`
    # (its number in this process), `steps`, `tokens`, `base` and `count` (the island's number of
    # merges of the fragment at the first step, and when it was encoded).
    return _read(Path(job_log_dir) / MERGES_FILE)[0]


def append_merge(job_log_dir: Path, merge: Mapping[str, Any]) -> None:
    """Append a line, after the state of the syncer that includes this merge is saved."""
    # After a power failure the last lines can be missing.
    with append_to(job_log_dir / MERGES_FILE) as file:
        file.write(json.dumps(merge) + "\n")


def restore_merges(job_log_dir: Path, last: int, known: Sequence[Mapping[str, Any]]) -> None:
    """Remove the merges that the syncer's saved state does not include, and add missing ones."""
    path = job_log_dir / MERGES_FILE
    merges, damaged = _read(path)
    if damaged:
        print_error(
            f"{path}: {name_lines(damaged)} cannot be read (expected a JSON object with merge) "
            "and will be removed; all other lines are kept."
        )
    kept = {merge["merge"]: merge for merge in [*known, *merges] if merge["merge"] <= last}
    if len(kept) < last:
        print_error(
            f"{path} has {len(kept)} of {last} merges, expected all of them. The state is the one "
            "after the newest merge. Restore the file from a copy, or continue without its lines."
        )
    if kept or path.exists():
        lines = [json.dumps(kept[number]) + "\n" for number in sorted(kept)]
        write_atomically(path, "".join(lines))


def _read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the merges, and the numbers of the damaged lines, from 1."""
    return read_json_lines(
        path,
        lambda line: isinstance(line, dict) and isinstance(line.get("merge"), int),
        "expected the file that `fedpax syncer` writes. Move it away to continue without the log "
        "of earlier merges, or restore it.",
    )


class RoundLog:
    """A writer of a line of metrics for each round of `phases` merges, from their reports."""

    def __init__(
        self, metrics: MetricsWriter, progress: Progress, phases: int, totals: Totals
    ) -> None:
        self._metrics, self._progress, self._phases = metrics, progress, phases
        before = max((line.get("wall_seconds", 0.0) for line in metrics.kept), default=0.0)
        self._clock = time.perf_counter()
        self._started = self._clock - before
        self._reports: list[MergeReport] = []
        self._tokens = totals.tokens

    def restore(self, merges: Sequence[Mapping[str, Any]], totals: Totals) -> None:
        """Add the saved merges of which a killed process has not written the line."""
        written = max((line["round"] for line in select(self._metrics.kept, "training")), default=0)
        merges = [m for m in merges if m["merge"] > written * self._phases and "loss" in m]
        reports = [read_report(merge) for merge in merges]
        self._tokens -= sum(report.tokens for report in reports)
        since = merges[0]["time"] if merges else 0.0
        for merge, report in zip(merges, reports, strict=True):
            self._reports.append(report)
            if report.merge % self._phases == 0:
                seconds, since = max(merge["time"] - since, 1e-3), merge["time"]
                self._started -= seconds
                self._write(seconds, totals)

    def add(self, report: MergeReport, totals: Totals) -> None:
        """Add a merge; write a line after the last one of a round."""
        self._reports.append(report)
        if report.merge % self._phases == 0:
            now = time.perf_counter()
            seconds, self._clock = now - self._clock, now
            self._write(seconds, totals)

    def _write(self, seconds: float, totals: Totals) -> None:
        reports, self._reports = self._reports, []
        tokens = sum(r.tokens for r in reports)
        self._tokens += tokens
        steps = sum(r.steps for r in reports)
        names = {name for r in reports for name in r.metrics}
        loss = sum(r.loss * r.steps for r in reports) / steps
        number = reports[-1].merge // self._phases
        self._metrics.write(
            "training",
            number,
            {name: sum(r.metrics[name] for r in reports) / len(reports) for name in names}
            | {
                "loss": loss,
                "participants": sum(len(r.islands) for r in reports) / len(reports),
                "late": sum(r.late for r in reports),
                "staleness": max(r.staleness for r in reports),
                "repeated": totals.repeated,
                "dropped": totals.stale + totals.not_finite + totals.too_large,
                # A step is part of one update of each fragment.
                "items": self._tokens / self._phases,
                "bytes_across_placement": totals.received_bytes + totals.sent_bytes,
                "seconds": seconds,
                "items_per_second": tokens / self._phases / seconds,
                "wall_seconds": self._clock - self._started,
            },
        )
        self._progress.show_round(number, loss, tokens / self._phases / seconds)
