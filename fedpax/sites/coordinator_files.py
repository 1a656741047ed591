"""The files of a coordinator beside its checkpoints: the federation, the sites, the metrics."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.console import count_of
from fedpax.files import explain_damage, read_json
from fedpax.run_files.metrics import MetricsWriter, select
from fedpax.run_files.paths import write_atomically
from fedpax.run_files.quantiles import with_quantiles
from fedpax.sites.contract import Json
from fedpax.sites.site_table import SITES, SiteTable
from fedpax.training.progress import Progress

FEDERATION = "federation.json"
"""The run's name, the shared inputs and the sites, in the coordinator's folder."""


def read_federation(folder: Path) -> dict[str, Any] | None:
    """Read `federation.json` of a coordinator's folder; None without the file."""
    path = folder / FEDERATION
    if not path.exists():
        return None
    expectation = "expected the file that `fedpax syncer` writes. Restore it from a copy."
    with explain_damage(path, expectation):
        content: dict[str, Any] = read_json(path)
        _ = content["run"], content["inputs"], content["sites"]
    return content


def write_federation(folder: Path, run: str, inputs: Json | None, sites: SiteTable) -> None:
    """Write `federation.json`."""
    content = {"run": run, "inputs": inputs, "sites": sites.to_json()}
    write_atomically(folder / FEDERATION, json.dumps(content, ensure_ascii=False) + "\n")


SECONDS_BETWEEN_TABLES = 2.0


class SiteWatch:
    """A reporter of changes in the sites' states, with `sites.json`."""

    def __init__(self, folder: Path, progress: Progress, sites: SiteTable) -> None:
        self._path, self._progress, self._sites = folder / SITES, progress, sites
        self._states: dict[str, str] = {}
        self._rivals: set[str] = set()  # names of which a second process was told
        self._next_file = 0.0

    def update(self, *, force: bool = False) -> None:
        """Report the changes since the last call, and write the table."""
        reports = self._sites.reports(time.monotonic())
        changed = [r for r in reports if self._states.get(r.name) != r.state]
        for report in changed:
            self._states[report.name] = report.state
            clients = count_of(report.clients, "client")
            self._progress.note(f"site {report.name} ({clients}): {report.state}")
        for name in sorted({site.name for site in self._sites if site.has_rival} - self._rivals):
            self._rivals.add(name)
            self._progress.note(
                f"another process calls itself {name}. {self._sites.advise_rival()}"
            )
        now = time.monotonic()
        if not changed and not force and now < self._next_file:
            return
        self._next_file = now + SECONDS_BETWEEN_TABLES
        rows = [report._asdict() for report in reports]
        write_atomically(self._path, json.dumps(rows, indent=2) + "\n")


class RoundMetrics:
    """A writer of a line of metrics for each round over sites."""

    def __init__(self, metrics: MetricsWriter, progress: Progress) -> None:
        self._metrics, self._progress = metrics, progress
        last = (select(metrics.kept, "training") or [{}])[-1]
        self._started = time.perf_counter() - (last.get("wall_seconds") or 0.0)
        self._bytes = last.get("bytes_across_placement") or 0.0
        self._examples = last.get("items") or 0

    def add(
        self,
        number: int,
        metrics: Mapping[str, Any],
        *,
        sites: int,
        examples: int,
        sent_bytes: int,
        received_bytes: int,
        seconds: float,
    ) -> None:
        """Write the line of a round, and show it."""
        values = {k: float(np.asarray(v)) for k, v in with_quantiles(metrics).items()}
        self._bytes += sent_bytes + received_bytes
        self._examples += examples
        self._metrics.write(
            "training",
            number,
            {
                **values,
                "sites": sites,
                "sent_bytes": sent_bytes,
                "received_bytes": received_bytes,
                "items": self._examples,
                "bytes_across_placement": self._bytes,
                "seconds": seconds,
                "items_per_second": examples / seconds,
                "wall_seconds": time.perf_counter() - self._started,
            },
        )
        self._progress.show_round(number, values.get("loss", math.nan), examples / seconds)

    def add_evaluation(
        self, number: int, mean: Mapping[str, float], by_site: Mapping[str, float]
    ) -> None:
        """Write the metrics on held-out examples: their mean, and the metrics of each site."""
        seconds = {"wall_seconds": time.perf_counter() - self._started}
        self._metrics.write("evaluation", number, {**mean, **by_site, **seconds})
        self._progress.show_evaluation(number, mean)
