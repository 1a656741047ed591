"""The table of a syncer's islands, as text, and as `islands.json` for `fedpax show`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedpax.console import format_value, markdown_table
from fedpax.sites.report_tables import ReportWatch, format_ago, read_reports
from fedpax.training.progress import Progress

TABLE_FILE = "islands.json"
SECONDS_BETWEEN_TABLES = 10.0


class IslandReport(NamedTuple):
    """One island in a table: its name, state, shard, and counts as in `members.IslandRecord`."""

    name: str
    state: str  # one of `members.State`
    shard: int | None
    steps: int
    loss: float | None
    contributed: int
    late: int
    dropped: int
    seconds_since_message: float | None  # None: it has not joined
    site: str = ""  # the name of its certificate, or without one its own name

    @property
    def subject(self) -> str:
        """The island, in a line on its state."""
        shard = "no shard" if self.shard is None else f"shard {self.shard}"
        return f"island {self.name} ({shard})"


def read_islands(job_log_dir: str | Path) -> list[IslandReport]:
    """Read the islands as the syncer last wrote them; empty without a readable file."""
    return read_reports(Path(job_log_dir) / TABLE_FILE, IslandReport)


class IslandWatch(ReportWatch[IslandReport]):
    """A reporter of changes in the islands' states, with a table and `islands.json`."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        super().__init__(folder / TABLE_FILE, progress)
        self._next_table = time.monotonic() + SECONDS_BETWEEN_TABLES

    def update(self, reports: Sequence[IslandReport], *, force: bool = False) -> None:
        """Report the changes since the last call, and print and write the table."""
        super().update(reports, force=force)
        now = time.monotonic()
        if now >= self._next_table and reports:
            self._next_table = now + SECONDS_BETWEEN_TABLES
            self._progress.note("islands\n" + format_islands(reports))


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
            format_ago(island.seconds_since_message),
        )
        for island in islands
    ]
    return markdown_table(head, rows)
