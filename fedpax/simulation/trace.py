"""Trace: the speeds, transfers, failures, returns and arrivals of a population."""

import json
import zipfile
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from fedpax.errors import ArgumentError
from fedpax.files import check_fetched, parse_json
from fedpax.primitives.casts import checked_cast
from fedpax.simulation.distributions import Distribution, constant


@dataclass(frozen=True, eq=False, init=False)
class Trace:
    """Speeds of the participants of a population, and the times at which each is down.

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

    A participant's speed and transfer times are drawn once. It arrives once, and then alternates
    between up and down. A change of one argument does not change the draws of another.

    Args:
        num_participants: size of the population.
        seed: the random seed.
        seconds_per_step: distribution of the seconds of a local step.
        seconds_to_receive: distribution of the seconds to receive the model. Default None: 0.
        seconds_to_send: distribution of the seconds to send an update. Default None: 0.
        time_to_failure: distribution of the seconds between a return and the next failure. Default
            None: no failures.
        time_to_return: distribution of the seconds between a failure and the return. Default None:
            no return.
        arrival: distribution of the second in which a participant arrives. Default None: second 0.
        horizon: the second up to which failures are drawn. Required with `time_to_failure`.

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


# ---- times at which participants are up, for a simulation that looks at one of them at a time


class UpTimes:
    """Times at which each participant of a trace is up."""

    def __init__(self, trace: Trace) -> None:
        self.has_failures = trace.downtimes.shape[1] > 0
        self._times = trace.downtimes.reshape(trace.num_participants, -1)
        # The failures and returns of the participants that were looked at, few of a million.
        self._rows: dict[int, list[float]] = {}

    def _row(self, client: int, now: float) -> tuple[list[float], int]:
        """Return a client's failures and returns, and how many of them are not after `now`."""
        row = self._rows.get(client)
        if row is None:
            row = self._rows[client] = self._times[client].tolist()
        return row, bisect_right(row, now)

    def next_up(self, client: int, now: float) -> float:
        """Return `now` if the client is up, or else when it returns."""
        row, before = self._row(client, now)
        return row[before] if before % 2 else now

    def next_failure(self, client: int, now: float) -> float:
        """Return when a client that is up fails next; infinity for never."""
        row, before = self._row(client, now)
        before += before % 2
        return row[before] if before < len(row) else np.inf

    def next_event(self, client: int, now: float, duration: float) -> tuple[float, bool]:
        """Return when work that begins now ends and True, or when the client returns and False."""
        up = self.next_up(client, now)
        if up > now:
            return up, False
        end, failure = now + duration, self.next_failure(client, now)
        return (self.next_up(client, failure), False) if failure < end else (end, True)


# ---- files of traces: NumPy archives, and JSON lines with one participant a line

FIELDS = ("seconds_per_step", "seconds_to_receive", "seconds_to_send")


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace to a file.

    Args:
        trace: the trace.
        path: a file ending in `.npz` (the arrays of `Trace`) or `.jsonl`. A line of `.jsonl` is a
            participant: `{"seconds_per_step": 1.5, "seconds_to_receive": 0.1, "seconds_to_send":
            0.2, "downtimes": [[60.0, 90.0], [120.0, null]]}`, null for never.

    Raises:
        ValueError: the name ends otherwise.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_trace(Trace(np.array([1.0, 2.5])), f"{folder}/trace.jsonl")
        ...     load_trace(f"{folder}/trace.jsonl").seconds_per_step.tolist()
        [1.0, 2.5]
    """
    path = Path(path)
    if _format(path) == ".npz":
        np.savez(path, downtimes=trace.downtimes, **{name: getattr(trace, name) for name in FIELDS})
        return
    lines = []
    for i in range(trace.num_participants):
        entry: dict[str, Any] = {name: float(getattr(trace, name)[i]) for name in FIELDS}
        intervals = trace.downtimes[i]
        entry["downtimes"] = [
            [float(start), None if np.isinf(end) else float(end)]
            for start, end in intervals[np.isfinite(intervals[:, 0])]
        ]
        lines.append(json.dumps(entry) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def load_trace(path: str | Path) -> Trace:
    r"""Read a trace in the format of `save_trace`.

    Args:
        path: a file ending in `.npz` or `.jsonl`. Of a line of `.jsonl`, `seconds_per_step` alone
            is required.

    Raises:
        ValueError: the name ends otherwise, a line is not a JSON object with these fields, or the
            values do not fit a `Trace`.
        FileNotFoundError: there is no such file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "measured.jsonl")
        ...     _ = file.write_text('{"seconds_per_step": 0.5, "downtimes": [[60, 90]]}\n')
        ...     load_trace(file).is_up(75.0).tolist()
        [False]
    """
    path = Path(path)
    form = _format(path)
    check_fetched(path)
    return _load_arrays(path) if form == ".npz" else _load_lines(path)


def _load_arrays(path: Path) -> Trace:
    try:
        with np.load(path) as arrays:
            contents = {name: arrays[name] for name in arrays.files}
    except (ValueError, zipfile.BadZipFile):
        raise ArgumentError(
            f"{path} is no NumPy archive of arrays of numbers. Write it with save_trace."
        ) from None
    if missing := {*FIELDS, "downtimes"} - contents.keys():
        raise ArgumentError(f"{path} has no {min(missing)}. Write it with save_trace.")
    try:
        return Trace(**{name: contents[name] for name in (*FIELDS, "downtimes")})
    except ValueError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _load_lines(path: Path) -> Trace:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ArgumentError(
            f"{path} is no text, expected lines of JSON. Write it with save_trace."
        ) from None
    entries = [
        _entry(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    most = max((len(entry["downtimes"]) for entry in entries), default=0)
    downtimes = np.full((len(entries), most, 2), np.inf)
    for i, entry in enumerate(entries):
        for k, (start, end) in enumerate(entry["downtimes"]):
            downtimes[i, k] = start, np.inf if end is None else end
    values = {name: np.array([entry[name] for entry in entries], np.float64) for name in FIELDS}
    try:
        return Trace(**values, downtimes=downtimes)
    except ValueError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _format(path: Path) -> str:
    if path.suffix not in (".npz", ".jsonl"):
        raise ArgumentError(
            f"{path} ends in {path.suffix!r}, expected '.npz' or '.jsonl'. Rename it."
        )
    return path.suffix


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    """Read a participant's line, and fill in the defaults."""
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ArgumentError(f"{path}, line {number}: not JSON: {error}.") from None
    known = {*FIELDS, "downtimes"}
    if not isinstance(entry, dict) or "seconds_per_step" not in entry or set(entry) - known:
        raise ArgumentError(
            f"{path}, line {number}: expected an object with seconds_per_step and, if need be, "
            f"{', '.join(sorted(known - {'seconds_per_step'}))}. Name the fields so."
        )
    defaults: dict[str, Any] = {**dict.fromkeys(FIELDS, 0.0), "downtimes": []}
    entry = defaults | entry
    downtimes = entry["downtimes"]
    if not (
        all(_is_number(entry[name]) for name in FIELDS)
        and isinstance(downtimes, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in downtimes)
        and all(_is_number(start) for start, _ in downtimes)
        and all(end is None or _is_number(end) for _, end in downtimes)
    ):
        raise ArgumentError(
            f"{path}, line {number}: expected seconds as numbers, and downtimes as pairs "
            "[failure, return], the return null for never."
        )
    return entry


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
