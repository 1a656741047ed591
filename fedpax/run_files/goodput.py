"""Goodput: the wall time of a run by its use, over all processes that trained it."""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from fedpax.errors import ArgumentError
from fedpax.files import read_json
from fedpax.run_files.metrics_log import last_line
from fedpax.run_files.paths import GOODPUT, write_atomically

Bucket: TypeAlias = Literal["input", "compile", "step", "evaluate", "save", "lost"]


BUCKETS: tuple[Bucket, ...] = get_args(Bucket)


SECONDS_BETWEEN_WRITES = 10.0


CHECKPOINTS_REMEMBERED = 16


Seconds: TypeAlias = dict[Bucket, float]
"""Seconds by bucket."""


class GoodputClock(AbstractContextManager["GoodputClock"]):
    """A clock that counts every second of a run in one bucket; a context manager.

    The buckets, a table in docs/long_runs.md, add up to the wall time of all processes. Goodput is
    the fraction of `step`.

    `goodput.json` is written every ten seconds. The next process moves the time since its
    checkpoint to `lost`.

    Args:
        folder: the run's folder.
        after: the round of the checkpoint from which the run resumes; 0 for a new run. If
            `goodput.json` lacks its seconds, the last line of `metrics.jsonl` up to this round
            counts.
        enabled: False writes no file; with several processes only one writes.
        now: returns the time in seconds.

    Example:
        >>> import tempfile
        >>> times = iter([0.0, 2.0, 5.0, 6.0])
        >>> clock = GoodputClock(Path(tempfile.mkdtemp()), now=lambda: next(times))
        >>> clock.enter("step")  # after 2 seconds of compilation
        2.0
        >>> clock.seconds()["step"]
        3.0
    """

    def __init__(
        self,
        folder: Path,
        *,
        after: int = 0,
        enabled: bool = True,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._path = folder / GOODPUT
        self._enabled = enabled
        self.now = now
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._write_repeatedly, name="goodput", daemon=True)
        self._bucket: Bucket = "compile"
        self._entered = now()
        self._longest: Seconds = dict.fromkeys(BUCKETS, 0.0)
        known = read_goodput(folder)
        if known is None or after not in known[1]:
            line = last_line(folder, after) if after else None
            seconds = dict.fromkeys(BUCKETS, 0.0) if line is None else _seconds_of(line)
            known = (seconds, {}) if known is None else known
            known[1][after] = dict(seconds)
        self._seconds, self._at_checkpoint = known
        self._lose_since(after)

    def enter(self, bucket: Bucket) -> float:
        """Count in another bucket from now on; return the seconds since the last call."""
        with self._lock:
            now = self.now()
            passed = now - self._entered
            self._seconds[self._bucket] += passed
            self._longest[self._bucket] = max(self._longest[self._bucket], passed)
            self._bucket, self._entered = bucket, now
            return passed

    def current(self) -> tuple[Bucket, float]:
        """Return the bucket that counts now, and the time at which it was entered."""
        with self._lock:
            return self._bucket, self._entered

    def longest(self, bucket: Bucket) -> float:
        """Return the longest time from entering a bucket to the next `enter`, in this process."""
        with self._lock:
            return self._longest[bucket]

    def move(self, seconds: float, source: Bucket, target: Bucket) -> None:
        """Count past seconds in another bucket."""
        with self._lock:
            self._seconds[source] -= seconds
            self._seconds[target] += seconds

    def seconds(self) -> Seconds:
        """Return the seconds by bucket until now."""
        with self._lock:
            current = {self._bucket: self.now() - self._entered}
            return {bucket: self._seconds[bucket] + current.get(bucket, 0.0) for bucket in BUCKETS}

    def mark_checkpoint(self, round_number: int) -> None:
        """Record the seconds at a checkpoint: time after it is lost if the run returns to it."""
        with self._lock:
            self._at_checkpoint[round_number] = self.seconds()
            for number in sorted(self._at_checkpoint)[:-CHECKPOINTS_REMEMBERED]:
                del self._at_checkpoint[number]
        self.write()

    def lose_since(self, round_number: int) -> None:
        """Move the time since a checkpoint to `lost`, and count in `lost` from now on."""
        # Time in which a process started and compiled stays in `compile`.
        with self._lock:
            self.enter("lost")
            self._lose_since(round_number)

    def _lose_since(self, round_number: int) -> None:
        kept = self._at_checkpoint.get(round_number, self._seconds)
        for bucket in ("input", "step", "evaluate", "save"):
            self.move(self._seconds[bucket] - kept[bucket], bucket, "lost")
        for later in [number for number in self._at_checkpoint if number > round_number]:
            del self._at_checkpoint[later]

    def write(self) -> None:
        """Write `goodput.json`. A full disk does not stop the run here."""
        if not self._enabled:
            return
        with self._lock, contextlib.suppress(OSError):
            content = {"seconds": self.seconds(), "checkpoints": self._at_checkpoint}
            write_atomically(self._path, json.dumps(content) + "\n")

    def _write_repeatedly(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_WRITES):
            self.write()

    def __enter__(self) -> "GoodputClock":
        """Start to write the file."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Write the file for the last time. A run refused at its start leaves no file."""
        self._done.set()
        self._thread.join()
        if error[0] is None or self._path.exists():
            self.write()


def read_goodput(folder: Path) -> tuple[Seconds, dict[int, Seconds]] | None:
    """Read the seconds now and at checkpoints; None if `goodput.json` is missing or damaged."""
    try:
        content = read_json(folder / GOODPUT)
        at_checkpoint = {int(k): _checked(v) for k, v in content["checkpoints"].items()}
        return _checked(content["seconds"]), at_checkpoint
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def describe_goodput(seconds: Mapping[Bucket, float]) -> str:
    """Describe the wall time by its use, in one line."""
    wall = sum(seconds.values())
    shares = {name: part / wall if wall else 0.0 for name, part in seconds.items()}
    rest = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if name != "step")
    return f"goodput {shares['step']:.1%} of {wall:,.0f} s ({rest})"


def line_values(seconds: Mapping[Bucket, float]) -> dict[str, float]:
    """Return the entries of a line of `metrics.jsonl`: `step_seconds` and others, and their sum."""
    named = {f"{bucket}_seconds": value for bucket, value in seconds.items()}
    return {**named, "wall_seconds": sum(seconds.values())}


def _seconds_of(line: Mapping[str, Any]) -> Seconds:
    """Read the seconds of a line; a line of an earlier version has only their sum."""
    if f"{BUCKETS[0]}_seconds" in line:
        return {bucket: line[f"{bucket}_seconds"] for bucket in BUCKETS}
    return {**dict.fromkeys(BUCKETS, 0.0), "step": line.get("wall_seconds") or 0.0}


def _checked(seconds: Mapping[Bucket, float]) -> Seconds:
    if not all(math.isfinite(seconds[bucket]) for bucket in BUCKETS):
        raise ArgumentError("a bucket is not finite")
    return {bucket: float(seconds[bucket]) for bucket in BUCKETS}
