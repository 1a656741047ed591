"""The table of a syncer's islands, as text, and as `islands.json` for `fedpax show`."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from fedpax.console import format_seconds, format_value, markdown_table
from fedpax.errors import ConfigurationError
from fedpax.files import read_json, replace_file
from fedpax.islands.syncer.members import IslandReport
from fedpax.run_files.metrics_log import is_finite_number
from fedpax.training.progress import Progress

TABLE_FILE = "islands.json"
SECONDS_BETWEEN_TABLES = 10.0


def read_islands(job_log_dir: str | Path) -> list[IslandReport]:
    """Read the islands as the syncer last wrote them; empty without a readable file."""
    try:
        content = read_json(Path(job_log_dir) / TABLE_FILE)
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
        is_finite_number(value) or (value is None and field in optional)
        for field, value in known.items()
    )


class IslandWatch:
    """A reporter of changes in the islands' states, with a table and `islands.json`."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._path, self._progress = folder / TABLE_FILE, progress
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
