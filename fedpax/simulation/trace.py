"""Trace: the speeds, transfers, failures, returns and arrivals of a population."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from fedpax.errors import ArgumentError
from fedpax.primitives.casts import checked_cast
from fedpax.simulation.distributions import Distribution, constant


@dataclass(frozen=True, eq=False, init=False)
class Trace:
    """Speeds of the participants of a population, and the times at which each is down.

    A trace has no randomness left: what is computed from it is the same every time. Make one with
    `draw_trace` or `load_trace`, or from arrays. A participant that arrives late is down until it
    arrives. One that leaves for good is down until infinity.

    Attributes:
        seconds_per_step: float64 `[participants]`, above 0: seconds of one local step.
        seconds_to_receive: float64 `[participants]`: seconds until a participant has the model.
            Default None: 0.
        seconds_to_send: float64 `[participants]`: seconds until the server has an update. Default
            None: 0.
        downtimes: float64 `[participants, number, 2]`: the intervals `[failure, return)` in which a
            participant is down, in seconds, in order, not overlapping; rows are filled up with
            infinity. Default None: no failures.

    Raises:
        ValueError: an array has another shape, a negative entry or NaN, or intervals are not in
            order.

    Example:
        >>> trace = Trace(np.array([1.0, 2.0]), downtimes=np.array([[[5.0, 8.0]], [[np.inf] * 2]]))
        >>> trace.is_up(6.0).tolist(), trace.num_participants
        ([False, True], 2)
    """

    seconds_per_step: Float64[np.ndarray, " participants"]
    seconds_to_receive: Float64[np.ndarray, " participants"]
    seconds_to_send: Float64[np.ndarray, " participants"]
    downtimes: Float64[np.ndarray, "participants number 2"]

    def __init__(
        self,
        seconds_per_step: ArrayLike,
        seconds_to_receive: ArrayLike | None = None,
        seconds_to_send: ArrayLike | None = None,
        downtimes: ArrayLike | None = None,
    ) -> None:
        """Convert the arrays, fill in the defaults, and check both."""
        steps = checked_cast(seconds_per_step, np.float64, "seconds_per_step")
        if steps.ndim != 1 or not len(steps) or not np.all(np.isfinite(steps) & (steps > 0)):
            raise ArgumentError(
                f"seconds_per_step has shape {list(steps.shape)}"
                + (f" and minimum {steps.min()}" if steps.size else "")
                + ", expected one finite number above 0 per participant."
            )
        object.__setattr__(self, "seconds_per_step", steps)
        transfers = {"seconds_to_receive": seconds_to_receive, "seconds_to_send": seconds_to_send}
        for name, given in transfers.items():
            seconds = (
                np.zeros_like(steps) if given is None else checked_cast(given, np.float64, name)
            )
            if seconds.shape != steps.shape or not np.all(np.isfinite(seconds) & (seconds >= 0)):
                raise ArgumentError(
                    f"{name} has shape {list(seconds.shape)}, expected {len(steps)} finite numbers "
                    "of at least 0: one per participant, as seconds_per_step."
                )
            object.__setattr__(self, name, seconds)
        none = np.zeros((len(steps), 0, 2))
        downtimes = none if downtimes is None else checked_cast(downtimes, np.float64, "downtimes")
        if downtimes.ndim != 3 or downtimes.shape[::2] != (len(steps), 2):
            raise ArgumentError(
                f"downtimes has shape {list(downtimes.shape)}, expected [{len(steps)}, number, 2]: "
                "the failures and returns of each participant, filled up with infinity."
            )
        times = downtimes.reshape(len(steps), -1)
        # Not np.diff: the difference of two infinities is NaN.
        if np.any(np.isnan(times)) or np.any(times < 0) or np.any(times[:, 1:] < times[:, :-1]):
            raise ArgumentError(
                "downtimes has a NaN, a negative entry or intervals out of order. Sort the "
                "intervals of each participant, merge those that overlap, and let none begin "
                "before second 0."
            )
        object.__setattr__(self, "downtimes", downtimes)

    @property
    def num_participants(self) -> int:
        """The number of participants."""
        return len(self.seconds_per_step)

    def is_up(self, second: float) -> np.ndarray:
        """Return which participants are up at a second, bool `[participants]`."""
        down = (self.downtimes[..., 0] <= second) & (second < self.downtimes[..., 1])
        return ~np.any(down, axis=1)


def draw_trace(
    num_participants: int,
    *,
    seed: int,
    seconds_per_step: Distribution,
    seconds_to_receive: Distribution | None = None,
    seconds_to_send: Distribution | None = None,
    time_to_failure: Distribution | None = None,
    time_to_return: Distribution | None = None,
    arrival: Distribution | None = None,
    horizon: float = 0.0,
) -> Trace:
    """Draw a trace from distributions.

    Each participant has a speed and two transfer times of its own, drawn once. It arrives once, and
    then alternates: up for a draw of `time_to_failure`, down for a draw of `time_to_return`. Each
    argument has random numbers of its own, so that a change of one argument leaves the rest as they
    were.

    Args:
        num_participants: size of the population.
        seed: the random seed.
        seconds_per_step: distribution of the seconds of a local step.
        seconds_to_receive: distribution of the seconds to receive the model. Default None: 0.
        seconds_to_send: distribution of the seconds to send an update. Default None: 0.
        time_to_failure: distribution of the seconds between a return and the next failure. Default
            None: no failures.
        time_to_return: distribution of the seconds between a failure and the return. Default None:
            a participant that fails does not return.
        arrival: distribution of the second in which a participant arrives. Default None: all
            participants are there at second 0.
        horizon: the second up to which failures are drawn; there are none later. Required with
            `time_to_failure`.

    Returns:
        The trace.

    Raises:
        ValueError: `num_participants` below 1; `time_to_failure` without a `horizon` above 0;
            `time_to_return` without `time_to_failure`; or draws that a `Trace` refuses.

    Example:
        >>> from fedpax.simulation import exponential, lognormal
        >>> trace = draw_trace(
        ...     1000,
        ...     seed=1,
        ...     seconds_per_step=lognormal(median=1.0, sigma=0.5),
        ...     time_to_failure=exponential(300.0),
        ...     time_to_return=exponential(100.0),
        ...     horizon=10_000.0,
        ... )
        >>> round(float(trace.is_up(5_000.0).mean()), 1)  # 300 / (300 + 100)
        0.8
    """
    if num_participants < 1:
        raise ArgumentError(f"num_participants is {num_participants}, expected at least 1.")
    if time_to_failure is not None and not horizon > 0:
        raise ArgumentError(
            f"horizon is {horizon} with time_to_failure, expected the number of seconds for which "
            "to draw failures. Pass the length of the simulation, such as horizon=3600.0."
        )
    if time_to_return is not None and time_to_failure is None:
        raise ArgumentError(
            "time_to_return needs time_to_failure: there is no return without a failure. Pass both "
            "or arrival= for participants that arrive late."
        )
    streams = [np.random.default_rng((seed, stream)) for stream in range(6)]
    zero = constant(0.0)
    steps, receive, send = (
        (distribution or zero)(generator, num_participants)
        for distribution, generator in zip(
            (seconds_per_step, seconds_to_receive, seconds_to_send), streams, strict=False
        )
    )
    arrivals = (arrival or zero)(streams[3], num_participants)
    times = [np.zeros(num_participants), arrivals]  # down until the arrival
    if time_to_failure is not None:
        while np.any(times[-1] < horizon):
            failed = times[-1] + time_to_failure(streams[4], num_participants)
            failed = np.where(failed < horizon, failed, np.inf)
            down = np.inf if time_to_return is None else time_to_return(streams[5], len(failed))
            times += [failed, failed + down]
    downtimes = np.stack(times, axis=1).reshape(num_participants, -1, 2)
    if arrival is None:
        downtimes = downtimes[:, 1:]
    return Trace(steps, receive, send, downtimes)
