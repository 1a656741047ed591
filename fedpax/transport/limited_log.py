"""A log of strangers' messages: they can neither fill it nor send control characters to it."""

import logging
import threading
import time
from collections.abc import Callable

_MOST_REMEMBERED = 1000


class LimitedLog:
    """A log of warnings, of which at most `most` per interval are written.

    A warning that comes again within `remember` seconds is not written again.
    """

    def __init__(
        self,
        logger: logging.Logger,
        most: int = 20,
        seconds: float = 10.0,
        remember: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._most, self._seconds, self._clock = logger, most, seconds, clock
        self._lock = threading.Lock()
        self._end, self._count = float("-inf"), 0
        self._remember = remember
        self._known: dict[int, float] = {}  # the hash of a warning: when it last came; oldest first

    def warning(self, words: str, *values: object) -> None:
        """Write a warning, unless it repeats one, or count it."""
        text = escape(words % values)
        with self._lock:
            now, missing = self._clock(), 0
            last = self._known.pop(hash(text), float("-inf"))
            self._known[hash(text)] = now
            if len(self._known) > _MOST_REMEMBERED:
                del self._known[next(iter(self._known))]
            if now - last < self._remember:
                return
            if now >= self._end:
                missing = self._count - self._most
                self._end, self._count = now + self._seconds, 0
            self._count += 1
            if self._count > self._most:
                return
        if missing > 0:
            self._logger.warning(
                "%d more warnings in %g s were not written", missing, self._seconds
            )
        self._logger.warning("%s", text)


def escape(words: str) -> str:
    """Escape control characters, which could change a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
