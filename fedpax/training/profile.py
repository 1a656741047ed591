"""Profiles on demand: a trace of chosen rounds in the run's folder."""

import re
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from fedpax.errors import ArgumentError, ConfigurationError

FOLDER = "profile"


class Profile(AbstractContextManager["Profile"]):
    """A trace of some rounds by `jax.profiler`, in the folder `profile/`; a context manager.

    The devices finish all earlier rounds before the trace starts, and the traced rounds before it
    ends, so these rounds do not overlap with others. Each round is a step of the trace.

    Example:
        >>> import tempfile
        >>> folder, lines = Path(tempfile.mkdtemp()), []
        >>> with Profile("2:1", folder, lines.append) as profile:
        ...     for number in (1, 2, 3):
        ...         profile.before(number, wait=lambda: None)
        ...         profile.after(number, wait=lambda: None)
        >>> print(lines[-1].partition(" in ")[0], len(list(folder.rglob("*.xplane.pb"))))
        profile of rounds 2 to 2 1
    """

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
        self._folder = job_log_dir / FOLDER
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
    """Read the rounds to profile.

    Example:
        >>> parse_profile_at("50"), parse_profile_at("50:3")
        ((50, 1), (50, 3))
    """
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is None:
        raise ArgumentError(
            f"training.profile_at={text!r} is not a round, expected ROUND or ROUND:COUNT with "
            "numbers from 1. Set for example --training.profile_at=50:3 to profile rounds 50 to 52."
        )
    return int(match[1]), int(match[2] or 1)


def check_profile_at(profile_at: str | None, rounds: int) -> None:
    """Check that a run reaches the rounds to profile.

    Example:
        >>> check_profile_at("50:3", rounds=50)
        >>> check_profile_at("50:3", rounds=12)
        Traceback (most recent call last):
            ...
        fedpax.errors.ArgumentError: training.profile_at='50:3' begins at round 50, but ...
        a round from 1 to 12. Set for example --training.profile_at=12, or more --training.rounds.
    """
    if profile_at is not None and (first := parse_profile_at(profile_at)[0]) > rounds:
        raise ArgumentError(
            f"training.profile_at={profile_at!r} begins at round {first}, but "
            f"training.rounds={rounds}: expected a round from 1 to {rounds}. Set for example "
            f"--training.profile_at={rounds}, or more --training.rounds."
        )
