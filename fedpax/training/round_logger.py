"""Logging of rounds: metrics to files and progress to the user, without stalling the devices."""

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.algorithm import Metrics, State
from fedpax.errors import ArgumentError, ArgumentTypeError, FedpaxError
from fedpax.run_files.goodput import GoodputClock, line_values
from fedpax.run_files.metrics import RESERVED_METRICS, MetricsWriter, is_vector, with_quantiles
from fedpax.training.exchanged_bytes import UPLOADED_BYTES
from fedpax.training.experiment import HeldoutMetrics
from fedpax.training.flops_utilization import Utilization
from fedpax.training.progress import Progress
from fedpax.training.spikes import FiniteCheck, SpikeHistory


class NonFiniteError(FedpaxError, ArithmeticError):
    """The loss or the state is NaN or infinite; the message names the remedy."""

    exit_status = 1


EMPTY = "<empty>"  # among the metrics of a round: whether no participant takes part


@jax.jit
def is_empty(client_ids: jax.Array, num_examples: jax.Array | None) -> jax.Array:
    """Return whether no client of a cohort takes part, by their ids and weights."""
    present = client_ids >= 0
    return ~jnp.any(present if num_examples is None else present & (num_examples > 0))


class RoundLogger:
    """A logger that fetches a round's metrics after the next one is dispatched; `flush` waits."""

    def __init__(
        self,
        metrics: MetricsWriter,
        progress: Progress,
        *,
        clock: GoodputClock,
        history: SpikeHistory,
        items_per_round: int,
        bytes_across_placement: float,
        stop_on_non_finite: bool,
        utilization: Utilization | None = None,
    ) -> None:
        self._metrics = metrics
        self._progress = progress
        self._goodput = clock
        self._history = history
        self._utilization = utilization
        # Bytes per round depend on the number of devices.
        self._before = [line for line in metrics.kept if line["kind"] == "training"][-1:]
        self._items_per_round = items_per_round
        self._bytes_across_placement = bytes_across_placement
        self._uploaded_bytes = 0.0  # of a participant, in the rounds that this logger has logged
        self._num_participants = 1
        self._stop_on_non_finite = stop_on_non_finite
        self._pending: tuple[int, Metrics] | None = None
        self._has_warned = False
        self._has_noted_participants = False  # whose values are not finite
        self.waits_for: int | None = None
        self._idle = 0.0  # seconds since the clock was restarted
        self._clock = time.perf_counter()

    def log_run(self, num_parameters: int, num_participants: int, item_unit: str) -> None:
        """Log the sizes of the run, unless `metrics.jsonl` has them already."""
        self._num_participants = num_participants
        more = {"bytes_across_placement_per_round": self._bytes_across_placement}
        self._metrics.write_sizes(
            num_parameters, num_participants, item_unit, self._items_per_round, **more
        )

    def is_device_busy(self) -> bool:
        """Return whether the devices still compute the round that was dispatched last."""
        pending: Mapping[str, Any] = self._pending[1] if self._pending else {}
        return not all(value.is_ready() for value in pending.values())

    def log_round(self, round_number: int, metrics: Metrics, idle_seconds: float) -> None:
        """Accept the metrics of a round that was just dispatched, and log the round before it."""
        self._idle += idle_seconds
        self.flush()
        self._pending = (round_number, metrics)

    def flush(self) -> None:
        """Wait for the round that was dispatched last, and log it."""
        if self._pending is None:
            return
        (round_number, metrics), self._pending = self._pending, None
        self.waits_for = round_number
        values, vectors = _split(jax.device_get(metrics))
        self.waits_for = None
        # Of this round; logged is their number in all rounds.
        spiked = values.pop("spikes", None)
        self._uploaded_bytes += values.get(UPLOADED_BYTES, math.nan) / self._num_participants
        loss, nobody, is_spike = values["loss"], bool(values.pop(EMPTY, 0)), False
        if nobody:  # the mean of no losses is 0; such a round is no spike
            values["loss"] = loss = math.nan
        else:
            recorded = None if spiked is None else bool(spiked)
            is_spike = self._history.add(round_number, loss, recorded)
        now = time.perf_counter()
        seconds, idle = now - self._clock, self._idle
        self.restart_clock(now)
        items_per_second = self._items_per_round / seconds
        mfu = None if self._utilization is None else self._utilization.mfu(items_per_second)
        self._metrics.write(
            "training",
            round_number,
            {
                **values,
                **self._history.counts._asdict(),
                **self._counts(round_number),
                "seconds": seconds,
                "input_wait_fraction": idle / seconds,
                "items_per_second": items_per_second,
                **({} if mfu is None else {"mfu": mfu}),
                **line_values(self._goodput.seconds()),
            },
            vectors,
        )
        self._progress.show_round(round_number, None if nobody else loss, items_per_second, mfu)
        self._note_non_finite(round_number, values.get("non_finite_participants", 0.0))
        self._history.check(round_number, loss, is_spike)
        ignored = self._history.on_spike == "ignore"
        if self._stop_on_non_finite and ignored and not (nobody or math.isfinite(loss)):
            raise NonFiniteError(f"the loss of round {round_number} is {loss}")

    def _note_non_finite(self, round_number: int, count: float) -> None:
        """Tell the user once that metrics leave out participants whose values are not finite."""
        if count > 0 and not self._has_noted_participants:
            self._has_noted_participants = True
            self._progress.note(
                f"round {round_number}: the values of {count:g} of {self._num_participants} "
                "participants are not finite; the metrics leave them out, and the metric "
                "non_finite_participants counts them"
            )

    def log_evaluation(self, round_number: int, metrics: HeldoutMetrics) -> dict[str, float]:
        """Log the metrics on held-out data."""
        floats, vectors = as_floats(metrics)
        values = floats | self._counts(round_number) | line_values(self._goodput.seconds())
        self._metrics.write("evaluation", round_number, values, vectors)
        self._progress.show_evaluation(round_number, floats)
        self.restart_clock()
        return floats

    def _counts(self, round_number: int) -> dict[str, float]:
        """Return the items and bytes of all rounds so far."""
        rounds, items, exchanged = 0, 0, 0.0
        for line in self._before:  # of another mesh, or other numbers of participants and items
            rounds, items = line["round"], line["items"]
            exchanged = _number(line["bytes_across_placement"])
        added = round_number - rounds
        new = added * self._bytes_across_placement if added else 0.0
        return {
            "items": items + added * self._items_per_round,
            "bytes_across_placement": exchanged
            + (self._uploaded_bytes if math.isnan(new) else new),
        }

    def check_state(self, round_number: int, state: State, check: FiniteCheck) -> None:
        """Check that the state is finite before it is saved."""
        # A run that neither stops nor rolls back prints a line once.
        path = check.find(state)
        if path is None:
            return
        what = f"state{path} is not finite after round {round_number}"
        if self._history.on_spike == "roll_back":
            raise self._history.spike_of_state(round_number, what)
        if self._stop_on_non_finite:
            raise NonFiniteError(what)
        if not self._has_warned:
            self._has_warned = True
            self._progress.note(f"{what}; checkpoints from this round on hold it")

    def restart_clock(self, now: float | None = None) -> None:
        """Exclude the time since the last round from the throughput."""
        self._clock = time.perf_counter() if now is None else now
        self._idle = 0.0


def _split(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return metrics as floats, with the quantiles of vectors, and the vectors themselves."""
    vectors = {name: np.asarray(value) for name, value in metrics.items() if is_vector(value)}
    return {k: np.asarray(v).item() for k, v in with_quantiles(metrics).items()}, vectors


def as_floats(values: HeldoutMetrics) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Check what `Run.evaluate` returns; return its numbers, and its arrays."""
    if not isinstance(values, Mapping):
        raise ArgumentError(
            f"Run.evaluate returns a {type(values).__name__}, expected a dict of metrics with the "
            'key "loss". Return for example {"loss": float(loss)}.'
        )
    if "loss" not in values:
        raise ArgumentError(
            f"Run.evaluate returns the metrics {sorted(map(str, values))}, expected the key "
            '"loss". Add the loss on held-out data as metrics["loss"].'
        )
    if reserved := sorted(RESERVED_METRICS & values.keys()):
        raise ArgumentError(
            f"Run.evaluate returns the metrics {reserved}, expected names that the training loop "
            "does not use itself: it would overwrite them in metrics.jsonl. Rename them."
        )
    for name, value in values.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"Run.evaluate returns a metric named {name!r}, expected a text. Return for "
                "example {'accuracy': accuracy}."
            )
        try:
            if value is None:  # NaN to NumPy
                raise ArgumentTypeError("None")
            if not is_vector(value) or name == "loss":
                np.asarray(value, np.float64).item()
            else:
                np.asarray(value, np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            shape = getattr(value, "shape", None)
            described = f"a {type(value).__name__}" if shape is None else f"an array {list(shape)}"
            raise ArgumentError(
                f"Run.evaluate returns metrics[{name!r}] as {described}, expected a number. Return "
                "one metric per number, for example its mean, or a vector with a value for each "
                "client."
            ) from error
    return _split(values)


def _number(value: float | None) -> float:
    """Return a number of `metrics.jsonl`, where NaN is null."""
    return math.nan if value is None else value
