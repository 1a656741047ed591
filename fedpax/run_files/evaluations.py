"""The evaluations of a run: the best one, and the end of a run that no longer improves."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedpax.errors import ArgumentError
from fedpax.run_files.metrics import select

STOP = "stop"
"""The kind of the line of `metrics.jsonl` of a run that stopped early."""


class BestMetric(NamedTuple):
    """A held-out metric, and which of its values are better."""

    name: str
    smaller: bool

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value is finite and better; any finite value is better than NaN."""
        if not math.isfinite(value) or math.isnan(than):
            return math.isfinite(value)
        return value < than if self.smaller else value > than


def parse_best_metric(text: str) -> BestMetric:
    """Parse `NAME`, `min:NAME` or `max:NAME`; without, smaller values of a `...loss` are better."""
    order, colon, name = text.rpartition(":")
    if not name or (colon and order not in ("min", "max")):
        raise ArgumentError(
            f"training.keep_best={text!r} is not a metric, expected the name of a held-out metric, "
            "or min:NAME or max:NAME. Set for example --training.keep_best=loss."
        )
    return BestMetric(name, order == "min" if colon else name.endswith("loss"))


class Evaluations:
    """The evaluations of a run: the best one, and the number since then, as logged."""

    def __init__(
        self, lines: Iterable[Mapping[str, Any]], keep_best: str | None, stop_after: int
    ) -> None:
        self.metric = parse_best_metric(keep_best or "loss")
        self._stop_after = stop_after
        self.best_round, self.best, self.waited = 0, math.nan, 0
        for line in select(lines, "evaluation"):
            if self.metric.name in line:  # it may have been added since
                self.add(line["round"], line)

    def add(self, round_number: int, metrics: Mapping[str, float | None]) -> bool:
        """Add an evaluation; return whether it is the best so far."""
        if self.metric.name not in metrics:
            raise ArgumentError(
                f"training.keep_best={self.metric.name}: the evaluation has no metric "
                f"{self.metric.name!r}, expected one of {', '.join(metrics)}. Set "
                "--training.keep_best to one of them."
            )
        measured = metrics[self.metric.name]
        value = math.nan if measured is None else float(measured)
        improved = self.metric.is_better(value, self.best)
        if improved:
            self.best_round, self.best, self.waited = round_number, value, 0
        else:
            self.waited += 1
        return improved

    @property
    def reason(self) -> str | None:
        """Why the run stops now; None: it does not."""
        if not self._stop_after or self.waited < self._stop_after:
            return None
        best = f"{self.best:.4f}, of round {self.best_round}," if self.best_round else "NaN"
        count = f"{self.waited} evaluation{'s' * (self.waited > 1)}"
        return f"the held-out {self.metric.name} has not improved on {best} in {count}"
