"""Shows how a run goes: a bar on a terminal, plain lines anywhere else."""

import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Progress(AbstractContextManager["Progress"]):
    """A progress bar with loss, tokens/s and time left on standard error; a context manager.

    Where standard error is not a terminal, it prints a line at each evaluation and otherwise at
    most one every ten seconds.

    Args:
        name: what is trained.
        first: how many rounds are done already.
        rounds: how many there are in all.
        shows: whether anything is shown; with several processes one of them does.
    """

    def __init__(self, name: str, *, first: int, rounds: int, shows: bool = True) -> None:
        self._name = name
        self._rounds = rounds
        self._clock: tuple[int, float] | None = None  # the first round shown, and when
        self._last_line = time.perf_counter()
        self._shows = shows
        self._bar = (
            tqdm(total=rounds, initial=first, desc=name, unit="round", dynamic_ncols=True)
            if shows and sys.stderr.isatty()
            else None
        )
        self._evaluation = ""

    def round(self, number: int, loss: float, tokens_per_second: float) -> None:
        """Shows a round that is done.

        Args:
            number: which one, from 1.
            loss: its mean training loss.
            tokens_per_second: of this round.
        """
        if self._clock is None:
            self._clock = (number, time.perf_counter())
        text = f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text + self._evaluation, refresh=False)
            self._bar.update()
        elif time.perf_counter() - self._last_line > SECONDS_BETWEEN_LINES:
            self._line(number, f"{text}{self._time_left(number)}")

    def evaluation(self, number: int, values: Mapping[str, float]) -> None:
        """Shows the metrics on held-out data.

        Args:
            number: the round after which they were measured.
            values: the metrics by name.
        """
        self._evaluation = f", held-out {values['loss']:.4f}"
        if self._bar is None:
            first = {"loss": values["loss"], **values}
            text = ", ".join(f"{key} {value:.4f}" for key, value in first.items())
            self._line(number, f"held-out {text}{self._time_left(number)}")

    def _line(self, number: int, text: str) -> None:
        if self._shows:
            print(f"{self._name} round {number}/{self._rounds}: {text}", file=sys.stderr)
        self._last_line = time.perf_counter()

    def _time_left(self, number: int) -> str:
        # Counted from the first round's end, so that its compilation does not mislead.
        if self._clock is None or number <= self._clock[0]:
            return ""
        first, started = self._clock
        seconds = (time.perf_counter() - started) / (number - first) * (self._rounds - number)
        return f", {tqdm.format_interval(seconds)} left"

    def __exit__(self, *error: object) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
