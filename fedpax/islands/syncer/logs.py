"""The logs of a syncer: a line for each merge with all its updates, and the metrics of rounds."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpax.console import print_error
from fedpax.errors import ConfigurationError
from fedpax.files import append_to, read_json, replace_file
from fedpax.islands.syncer.members import IslandReport
from fedpax.islands.syncer.updates import MergeReport, Totals, read_report
from fedpax.reports.metric_table import format_seconds, format_value, markdown_table
from fedpax.run_files.long_line_files import name_lines, read_json_lines
from fedpax.run_files.metrics import MetricsWriter, select
from fedpax.run_files.metrics_log import is_number
from fedpax.run_files.paths import write_atomically
from fedpax.training.progress import Progress

MERGES_FILE = "merges.jsonl"


def read_merges(job_log_dir: str | Path) -> list[dict[str, Any]]:
    """Read the merges of a syncer's run, without the damaged lines of a killed one."""
    # Fields: `merge` (its number, from 1), `fragment`, `time` (seconds since 1970), `loss`, `late`,
    # `staleness`, `metrics` (as in `MergeReport`), `record` (the identifier of the syncer's state
    # after the merge) and `updates`, each with `island`, `incarnation` (its process), `sequence`
    # (the update's number in this process), `steps` (inner steps), `tokens`, `base` and `count`
    # (the island's number of merges of the fragment at the update's first step, and when it was
    # encoded).
    return _read(Path(job_log_dir) / MERGES_FILE)[0]


def append_merge(job_log_dir: Path, merge: Mapping[str, Any]) -> None:
    """Append a line, after the state of the syncer that includes this merge is saved."""
    # The line survives the death of the process. After a power failure the last lines can be
    # missing.
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


# The metrics of a syncer's rounds, of which a killed process leaves none out.
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


# The table of a syncer's islands, as text, and as `islands.json` for `fedpax show`.
FILE = "islands.json"
SECONDS_BETWEEN_TABLES = 10.0


def read_islands(job_log_dir: str | Path) -> list[IslandReport]:
    """Read the islands as the syncer last wrote them; empty without a readable file."""
    try:
        content = read_json(Path(job_log_dir) / FILE)
        islands = [IslandReport(**island) for island in content]
    except (OSError, ValueError, TypeError):
        return []
    if not all(_is_whole(island) for island in islands):
        return []
    return [
        island
        if island.seconds_since_message is not None
        else island._replace(seconds_since_message=math.inf)
        for island in islands
    ]


def _is_whole(island: IslandReport) -> bool:
    """Return whether the fields have the types that the table shows."""
    name, state, *numbers, site = island
    optional = {"shard", "loss", "seconds_since_message"}
    known = dict(zip(IslandReport._fields[2:-1], numbers, strict=True))
    return all(isinstance(text, str) for text in (name, state, site)) and all(
        is_number(value) or (value is None and field in optional) for field, value in known.items()
    )


class IslandWatch:
    """A reporter of changes in the islands' states, with a table and `islands.json`."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._path, self._progress = folder / FILE, progress
        self._states: dict[str, str] = {}
        self._next_table = time.monotonic() + SECONDS_BETWEEN_TABLES
        self._next_file = 0.0

    def update(self, islands: Sequence[IslandReport], force: bool = False) -> None:
        """Compare the islands with the islands of the last call, and report the changes."""
        for island in islands:
            if self._states.get(island.name) != island.state:
                self._states[island.name] = island.state
                self._progress.note(f"island {island.name} ({_shard(island)}): {island.state}")
        now = time.monotonic()
        if now >= self._next_table and islands:
            self._next_table = now + SECONDS_BETWEEN_TABLES
            self._progress.note("islands\n" + format_islands(islands))
        if now >= self._next_file or force:
            self._next_file = now + 1.0
            content = [island._asdict() for island in islands]
            for fields in content:
                if math.isinf(fields["seconds_since_message"]):  # JSON has no infinity
                    fields["seconds_since_message"] = None
            text = json.dumps(content, indent=2) + "\n"
            try:  # without a flush to the disk, for which merges would wait
                replace_file(self._path, text.encode(), sync=False)
            except IsADirectoryError as error:
                raise ConfigurationError(
                    f"{error.filename2 or error.filename} is a folder, expected no folder: the "
                    "syncer writes the table of its islands to this file. Remove the folder, then "
                    "run the same command again to resume."
                ) from error


def _shard(island: IslandReport) -> str:
    return "no shard" if island.shard is None else f"shard {island.shard}"


def format_islands(islands: Sequence[IslandReport], *, sites: bool = False) -> str:
    """Format the islands of a syncer as a Markdown table, with the name of each site or without."""
    head = (
        *(("site",) if sites else ()),
        "island",
        "state",
        "shard",
        "steps",
        "loss",
        "merged",
        "late",
        "dropped",
        "last message",
    )
    rows = [
        (
            *((island.site,) if sites else ()),
            island.name,
            island.state,
            "-" if island.shard is None else str(island.shard),
            f"{island.steps:,}",
            "-" if island.loss is None else format_value(island.loss),
            str(island.contributed),
            str(island.late),
            str(island.dropped),
            "-"
            if math.isinf(island.seconds_since_message)
            else f"{format_seconds(island.seconds_since_message)} ago",
        )
        for island in islands
    ]
    return markdown_table(head, rows)
