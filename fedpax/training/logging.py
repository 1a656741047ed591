"""Turns what rounds return into lines, scalars and a bar, without holding up the devices."""

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.training.algorithm import Metrics, Params
from fedpax.training.metrics import MetricsWriter
from fedpax.training.progress import Progress


class NonFiniteError(ArithmeticError):
    """The loss or the parameters became NaN or infinite; the message says what to do."""


class Recorder:
    """Records rounds and evaluations.

    The metrics of a round are fetched after the next one was dispatched, so that the devices
    always have work; :meth:`flush` fetches them now.

    Args:
        metrics: where lines and scalars go.
        progress: what the user sees.
        started: the ``time.perf_counter()`` at which this run, or its continuation, began.
        tokens: tokens of one round.
        bytes_across_placement: bytes of one round that cross between participants.
        stop_on_non_finite: whether a loss that is not finite raises.
    """

    def __init__(
        self,
        metrics: MetricsWriter,
        progress: Progress,
        *,
        started: float,
        tokens: int,
        bytes_across_placement: float,
        stop_on_non_finite: bool,
    ) -> None:
        self._metrics = metrics
        self._progress = progress
        # The time of the processes before this one counts too.
        before = max((line.get("wall_seconds", 0.0) for line in metrics.kept), default=0.0)
        self._started = started - before
        self._tokens = tokens
        self._bytes_across_placement = bytes_across_placement
        self._stop_on_non_finite = stop_on_non_finite
        self._pending: tuple[int, Metrics] | None = None
        self._idle = 0.0  # since the clock was started
        self._clock = time.perf_counter()

    def run(self, parameters: int, participants: int) -> None:
        """Records what the run is, unless an earlier process has.

        Args:
            parameters: how many numbers the server's model has.
            participants: how many participants take part in a round.
        """
        if not self._metrics.kept:
            facts = {
                "parameters": parameters,
                "participants": participants,
                "items_per_round": self._tokens,
                "bytes_across_placement_per_round": self._bytes_across_placement,
            }
            self._metrics.write("run", 0, facts)

    def busy(self) -> bool:
        """Whether the devices still work on the round that was dispatched last."""
        pending: Mapping[str, Any] = self._pending[1] if self._pending else {}
        return not all(value.is_ready() for value in pending.values())

    def dispatched(self, round_number: int, metrics: Metrics, idle: float) -> None:
        """Takes a round that the devices have just been given, and records the one before.

        Args:
            round_number: the round, from 1.
            metrics: its metrics, which need not be computed yet.
            idle: the seconds for which the devices may have waited for the round's batches.
        """
        self._idle += idle
        self.flush()
        self._pending = (round_number, metrics)

    def flush(self) -> None:
        """Waits for the round that was dispatched last and records it.

        Raises:
            NonFiniteError: if its loss is not finite, unless that is allowed.
        """
        if self._pending is None:
            return
        (round_number, metrics), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, idle = now - self._clock, self._idle
        self.restart_clock(now)
        speed = self._tokens / seconds
        self._metrics.write(
            "training",
            round_number,
            {
                **values,
                "tokens": round_number * self._tokens,
                "bytes_across_placement": round_number * self._bytes_across_placement,
                "seconds": seconds,
                "input_wait_fraction": idle / seconds,
                "tokens_per_second": speed,
                "wall_seconds": now - self._started,
            },
        )
        self._progress.round(round_number, values["loss"], speed)
        if self._stop_on_non_finite and not math.isfinite(values["loss"]):
            raise NonFiniteError(f"the loss of round {round_number} is {values['loss']}")

    def evaluation(self, round_number: int, values: Mapping[str, float]) -> None:
        """Records the metrics on held-out data.

        Args:
            round_number: the round after which they were measured.
            values: the metrics by name, as floats, with ``"loss"``.
        """
        own = {
            "tokens": round_number * self._tokens,
            "bytes_across_placement": round_number * self._bytes_across_placement,
            "wall_seconds": time.perf_counter() - self._started,
        }
        # A loss function may report its tokens too: here they are those of the training.
        measured = {name: value for name, value in values.items() if name not in own}
        self._metrics.write("evaluation", round_number, measured | own)
        self._progress.evaluation(round_number, measured)
        self.restart_clock()

    def check_params(self, round_number: int, params: Params) -> None:
        """Makes sure that parameters are worth saving.

        Args:
            round_number: the round after which they stand.
            params: the server's model.

        Raises:
            NonFiniteError: if a parameter is not finite, unless that is allowed.
        """
        if self._stop_on_non_finite and not _all_finite(params):
            raise NonFiniteError(f"a parameter is not finite after round {round_number}")

    def restart_clock(self, now: float | None = None) -> None:
        """Leaves the time since the last round out of the throughput.

        Args:
            now: the `time.perf_counter()` from which to count; by default this moment.
        """
        self._clock = time.perf_counter() if now is None else now
        self._idle = 0.0


@jax.jit
def _all_finite(params: Params) -> jax.Array:
    finite = [
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(params)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.array(finite))
