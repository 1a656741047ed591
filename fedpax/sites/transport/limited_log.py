"""A log of strangers' messages: they can neither fill it nor send control characters to it."""

import logging
import threading
import time
from collections.abc import Callable


class LimitedLog:
    """A log of warnings, of which at most a number per interval is written.

    Args:
        logger: writes the warnings.
        most: number of warnings per interval. Default 20.
        seconds: the interval. Default 10.0.
        clock: returns seconds of a monotonic clock. Default `time.monotonic`.

    Example:
        >>> times = iter([0.0, 1.0, 2.0, 3.0, 11.0])
        >>> logger = logging.getLogger("example")
        >>> handler = logging.StreamHandler(__import__("sys").stdout)
        >>> logger.addHandler(handler)
        >>> log = LimitedLog(logger, most=2, clock=lambda: next(times))
        >>> for number in range(5):
        ...     log.warning("message %d is refused", number)
        message 0 is refused
        message 1 is refused
        2 more warnings in 10 s were not written
        message 4 is refused
        >>> logger.removeHandler(handler)
    """

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
        """Write a warning, or count it.

        Args:
            words: the text, with `%` for the values.
            *values: the values.
        """
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
    r"""Escape control characters, which could change a terminal.

    Example:
        >>> print(escape("an ö, \x1b[2J"))
        an ö, \x1b[2J
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
