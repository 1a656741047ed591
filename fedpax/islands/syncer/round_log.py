"""The metrics of a syncer's rounds, of which a killed process leaves none out."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedpax.islands.syncer.updates import MergeReport, Totals, read_report
from fedpax.run_files.metrics import MetricsWriter, select
from fedpax.training.progress import Progress


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
