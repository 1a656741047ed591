"""The log of an island: a line of metrics for each of its rounds, without stalling its devices."""

import math
import time
from collections.abc import Callable

import jax

from fedpax.algorithm import Metrics
from fedpax.run_files.metrics import MetricsWriter, select
from fedpax.training.logging import NonFiniteError
from fedpax.training.progress import Progress


class IslandLog:
    """A writer of metrics, which it fetches from the devices one round later."""

    def __init__(
        self,
        metrics: MetricsWriter,
        progress: Progress,
        *,
        transferred_bytes: Callable[[], int],
        started: float,
        items_per_round: int,
        stop_on_non_finite: bool,
    ) -> None:
        self._metrics, self._progress = metrics, progress
        self._transferred_bytes = transferred_bytes
        self._items_per_round = items_per_round
        self._stop_on_non_finite = stop_on_non_finite
        before = (select(metrics.kept, "training") or [{}])[-1]
        self._started = started - (before.get("wall_seconds") or 0.0)
        self._bytes_before = before.get("bytes_across_placement") or 0.0
        self._pending: tuple[int, Metrics, float] | None = None
        self._clock = time.perf_counter()

    def write_sizes(self, num_parameters: int, item_unit: str) -> None:
        """Write the sizes of the run, unless the file has them already."""
        self._metrics.write_sizes(
            {
                "num_parameters": num_parameters,
                "num_participants": 1,
                "item_unit": item_unit,
                "items_per_round": self._items_per_round,
            }
        )

    def add(self, round_number: int, metrics: Metrics, waited_seconds: float) -> None:
        """Accept the metrics of a dispatched round, and log the round before it."""
        self.flush()
        self._pending = round_number, metrics, waited_seconds

    def flush(self) -> None:
        """Wait for the round that was dispatched last, and log it."""
        if self._pending is None:
            return
        (number, metrics, waited), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        rate = self._items_per_round / seconds
        self._metrics.write(
            "training",
            number,
            {
                **values,
                "items": number * self._items_per_round,
                "bytes_across_placement": self._bytes_before + self._transferred_bytes(),
                "seconds": seconds,
                "merge_wait_fraction": min(waited / seconds, 1.0),
                "items_per_second": rate,
                "wall_seconds": now - self._started,
            },
        )
        self._progress.show_round(number, values["loss"], rate)
        if self._stop_on_non_finite and not math.isfinite(values["loss"]):
            raise NonFiniteError(
                f"the loss of this island's round {number} is {values['loss']}, expected a finite "
                "value. Start again with a smaller learning rate or with clipped gradients."
            )
