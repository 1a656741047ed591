"""The log of a syncer's merges: a line for each merge, with all of its updates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpax.console import print_error
from fedpax.files import append_to
from fedpax.run_files.json_lines import name_lines, read_json_lines
from fedpax.run_files.paths import write_atomically

FILE = "merges.jsonl"


def read_merges(job_log_dir: str | Path) -> list[dict[str, Any]]:
    """Read the merges of a syncer's run, without the damaged lines of a killed one."""
    # Fields: `merge` (its number, from 1), `fragment`, `time` (seconds since 1970), `loss`, `late`,
    # `staleness`, `metrics` (as in `MergeReport`), `record` (the identifier of the syncer's state
    # after the merge) and `updates`, each with `island`, `incarnation` (its process), `sequence`
    # (the update's number in this process), `steps` (inner steps), `tokens`, `base` and `count`
    # (the island's number of merges of the fragment at the update's first step, and when it was
    # encoded).
    return _read(Path(job_log_dir) / FILE)[0]


def append_merge(job_log_dir: Path, merge: Mapping[str, Any]) -> None:
    """Append a line, after the state of the syncer that includes this merge is saved."""
    # The line survives the death of the process. After a power failure the last lines can be
    # missing.
    with append_to(job_log_dir / FILE) as file:
        file.write(json.dumps(merge) + "\n")


def restore_merges(job_log_dir: Path, last: int, known: Sequence[Mapping[str, Any]]) -> None:
    """Remove the merges that the syncer's saved state does not include, and add missing ones."""
    path = job_log_dir / FILE
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
