"""A log of strangers' messages: they can neither fill it nor send control characters to it."""

import logging
import threading
import time
from collections.abc import Callable


class LimitedLog:
    """A log of warnings, of which at most `most` per interval are written."""

    def __init__(
        self,
        logger: logging.Logger,
        most: int = 20,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._most, self._seconds, self._clock = logger, most, seconds, clock
        self._lock = threading.Lock()
        self._end, self._count = float("-inf"), 0

    def warning(self, words: str, *values: object) -> None:
        """Write a warning, or count it."""
        with self._lock:
            now, missing = self._clock(), 0
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
        self._logger.warning("%s", escape(words % values))


def escape(words: str) -> str:
    """Escape control characters, which could change a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
