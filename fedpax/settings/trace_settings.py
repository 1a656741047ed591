"""The trace of an asynchronous experiment: speeds, transfers and failures of its participants."""

import dataclasses

import numpy as np

from fedpax.checks import CheckedConfig, NonNegative, Positive, PositiveOrInfinite
from fedpax.errors import ArgumentError
from fedpax.simulation import (
    Trace,
    constant,
    draw_trace,
    exponential,
    load_trace,
    lognormal,
    transfer_seconds,
)


@dataclasses.dataclass(frozen=True)
class TraceConfig(CheckedConfig):
    """Distributions of a population's speeds, networks and failures, or a file.

    Attributes:
        file: a trace that `fedpax.simulation.save_trace` wrote, .npz or .jsonl. All other fields
            are then unused. Default None: draw a trace.
        seconds_per_step: median of the seconds of a local step, lognormal over the participants.
        sigma: standard deviation of its logarithm; 0: all participants are equally fast.
        megabytes: size of the model, and of an update, on the network.
        megabytes_per_second: median bandwidth of a participant's network, lognormal over the
            participants. inf: transfers take no time.
        bandwidth_sigma: standard deviation of its logarithm.
        seconds_to_failure: mean seconds between a return and the next failure, exponential. Default
            None: no failures.
        seconds_to_return: mean seconds between a failure and the return, exponential. Default None:
            a participant that fails does not return.
        seconds_to_arrival: mean of the second in which a participant arrives, exponential. Default
            None: all are there at the start.
        horizon: seconds for which failures are drawn. A longer run raises.
        seed: random seed of all draws.
    """

    group = "trace"
    file: str | None = None
    seconds_per_step: Positive = 1.0
    sigma: NonNegative = 0.5
    megabytes: Positive = 1.0
    megabytes_per_second: PositiveOrInfinite = float("inf")
    bandwidth_sigma: NonNegative = 0.5
    seconds_to_failure: Positive | None = None
    seconds_to_return: Positive | None = None
    seconds_to_arrival: Positive | None = None
    horizon: Positive = 20_000.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if self.seconds_to_return is not None and self.seconds_to_failure is None:
            raise ArgumentError(
                f"trace.seconds_to_return={self.seconds_to_return} without failures, expected "
                "trace.seconds_to_failure too. Set --trace.seconds_to_failure, or leave out "
                "--trace.seconds_to_return."
            )

    def make(self, num_participants: int) -> Trace:
        """Read or draw the trace."""
        if self.file is not None:
            try:
                trace = load_trace(self.file)
            except OSError as error:
                raise ArgumentError(
                    f"trace.file={self.file} cannot be read ({error.strerror}), expected a file "
                    "that fedpax.simulation.save_trace wrote. Set --trace.file to its path."
                ) from None
            if trace.num_participants != num_participants:
                raise ArgumentError(
                    f"trace.file={self.file} has {trace.num_participants} participants, expected "
                    f"{num_participants}, as the experiment has. Set --trace.file to another "
                    "file, or change --islands or --population.num_clients."
                )
            return trace
        transfer = None
        if np.isfinite(self.megabytes_per_second):
            bandwidth = lognormal(1e6 * self.megabytes_per_second, self.bandwidth_sigma)
            transfer = transfer_seconds(1e6 * self.megabytes, bandwidth)
        failure, back, arrival = (
            None if mean is None else exponential(mean)
            for mean in (self.seconds_to_failure, self.seconds_to_return, self.seconds_to_arrival)
        )
        return draw_trace(
            num_participants,
            seed=self.seed,
            seconds_per_step=(
                lognormal(self.seconds_per_step, self.sigma)
                if self.sigma
                else constant(self.seconds_per_step)
            ),
            seconds_to_receive=transfer,
            seconds_to_send=transfer,
            time_to_failure=failure,
            time_to_return=back,
            arrival=arrival,
            horizon=self.horizon,
        )

    def check_horizon(self, last_second: float) -> None:
        """Check that failures were drawn up to the end of a run."""
        drawn = self.file is None and self.seconds_to_failure is not None
        if drawn and last_second > self.horizon:
            raise ArgumentError(
                f"trace.horizon={self.horizon:g}, but the run lasts {last_second:g} seconds, "
                "expected failures up to its end. Raise --trace.horizon, or lower "
                "--training.rounds."
            )
