"""A look into a run: a watchdog that tells a hang from slowness, and profiles on demand."""

import faulthandler
import io
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeAlias

import jax

from fedpax.console import print_error
from fedpax.errors import ArgumentError, ConfigurationError
from fedpax.files import append_to
from fedpax.run_files.goodput import Bucket, GoodputClock

OnHang: TypeAlias = Literal["report", "exit"]
HANG_STATUS = 70
"""The exit status after a hang with `on_hang="exit"`."""

SLOWER_THAN_BEFORE = 4
SLOWER_THAN_ROUNDS = 10

ACTIVITIES: dict[Bucket, str] = {
    "input": "waiting for its cohort",
    "step": "waiting for the devices",
    "compile": "building, restoring or compiling",
    "evaluate": "evaluating",
    "save": "saving a checkpoint",
    "lost": "rolling back",
}


class Watchdog(AbstractContextManager["Watchdog"]):
    """A thread that reports when a run makes no progress."""

    # An activity hangs after `hang_after` seconds, ten times as long if it is not a round's, and at
    # least 4 times the longest earlier one. `hang_round_R.txt` has the stacks.

    def __init__(
        self,
        clock: GoodputClock,
        folder: Path,
        round_number: Callable[[], int],
        *,
        hang_after: float | None,
        on_hang: OnHang = "report",
    ) -> None:
        self._clock = clock
        self._folder = folder
        self._round_number = round_number
        self._hang_after = hang_after
        self._on_hang = on_hang
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def limit(self, bucket: Bucket) -> float:
        """Return the seconds after which an activity hangs."""
        assert self._hang_after is not None
        is_round = bucket in ("step", "input")
        least = self._hang_after * (1 if is_round else SLOWER_THAN_ROUNDS)
        return max(least, SLOWER_THAN_BEFORE * self._clock.longest(bucket))

    def _watch(self) -> None:
        assert self._hang_after is not None
        reported, times = None, 1
        while not self._done.wait(min(self._hang_after / 10, 5.0)):
            bucket, entered = self._clock.current()
            seconds = self._clock.now() - entered
            if entered != reported:
                times = 1
            if seconds > times * self.limit(bucket):
                reported, times = entered, 2 * times
                self._report(bucket, seconds)

    def _report(self, bucket: Bucket, seconds: float) -> None:
        """Write the report; with `on_hang="exit"` end the process."""
        number = self._round_number()
        process = f"_process_{jax.process_index()}" if jax.process_count() > 1 else ""
        path = self._folder / f"hang_round_{number}{process}.txt"
        before = self._clock.longest(bucket)
        known = f"before, at most {before:.1f} s" if before else "for the first time"
        text = (
            f"no progress for {seconds:.1f} s in round {number} while {ACTIVITIES[bucket]} "
            f"({known}). The stacks of all threads are in {path}"
        )
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            with append_to(path) as file:
                file.write(f"{stamp}: {text}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            text += f", which cannot be written ({error.strerror})"
        ends = self._on_hang == "exit"
        print_error(f"fedpax: hang: {text}. {'Exiting.' if ends else 'Still waiting.'}")
        try:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
            pass  # stderr is closed, or not a file
        if ends:
            self._clock.write()
            os._exit(HANG_STATUS)  # sys.exit would end this thread alone

    def __enter__(self) -> "Watchdog":
        """Start watching, unless `hang_after` is None."""
        if self._hang_after is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching."""
        self._done.set()
        if self._hang_after is not None:
            self._thread.join()


# ---- profiles on demand: a trace of chosen rounds in the run's folder


class Profile(AbstractContextManager["Profile"]):
    """A trace of some rounds by `jax.profiler`, in the folder `profile/`."""

    def __init__(
        self,
        profile_at: str | None,
        job_log_dir: Path,
        note: Callable[[str], None],
        *,
        done: int = 0,
    ) -> None:
        self._first, count = (0, 0) if profile_at is None else parse_profile_at(profile_at)
        self._last = self._first + count - 1
        self._folder = job_log_dir / "profile"
        self._note = note
        self._done = done
        self._started: int | None = None
        self._dispatched = 0

    def __enter__(self) -> "Profile":
        """Say so if the run resumes after the rounds to profile."""
        if 0 < self._last <= self._done:
            self._note(
                f"nothing is profiled: training.profile_at names rounds {self._first} to "
                f"{self._last}, and the run resumes from round {self._done}"
            )
        return self

    def before(self, round_number: int, wait: Callable[[], None]) -> None:
        """Start the trace before its first round, or before a later one where the run resumes."""
        if self._started is None and self._first <= round_number <= self._last:
            wait()
            self._check_no_links()
            self._started = round_number
            jax.profiler.start_trace(self._folder)

    def after(self, round_number: int, wait: Callable[[], None]) -> None:
        """End the trace after its last round."""
        self._dispatched = round_number
        if self._started is not None and round_number >= self._last:
            wait()
            self._stop()

    def _check_no_links(self) -> None:
        for path in (self._folder, *self._folder.rglob("*")):
            if path.is_symlink():
                raise ConfigurationError(
                    f"{path} is a link, expected files and folders of the run: the profile would "
                    "be written where it leads. Remove the link, or leave out training.profile_at."
                )

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        started, last, self._started, self._last = self._started, self._dispatched, None, 0
        where = shlex.quote(str(self._folder))
        self._note(
            f"profile of rounds {started} to {last} in {where}; open it with: "
            f"xprof --logdir {where} (pip install xprof)"
        )

    def __exit__(self, *error: object) -> None:
        """End a trace that the end of the run interrupts."""
        if self._started is not None:
            self._stop()


def parse_profile_at(text: str) -> tuple[int, int]:
    """Read the rounds to profile."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is None:
        raise ArgumentError(
            f"training.profile_at={text!r} is not a round, expected ROUND or ROUND:COUNT with "
            "numbers from 1. Set for example --training.profile_at=50:3 to profile rounds 50 to 52."
        )
    return int(match[1]), int(match[2] or 1)


def check_profile_at(profile_at: str | None, rounds: int) -> None:
    """Check that a run reaches the rounds to profile."""
    if profile_at is not None and (first := parse_profile_at(profile_at)[0]) > rounds:
        raise ArgumentError(
            f"training.profile_at={profile_at!r} begins at round {first}, but "
            f"training.rounds={rounds}: expected a round from 1 to {rounds}. Set for example "
            f"--training.profile_at={rounds}, or more --training.rounds."
        )
