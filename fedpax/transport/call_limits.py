"""Limits of what strangers can occupy at a server: its threads, a site's calls, its log."""

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any


class CallPool(concurrent.futures.ThreadPoolExecutor):
    """Threads that each handle one call."""

    # A silent peer could occupy all threads: without a free one, the longest wait is ended.

    def __init__(self, max_calls: int) -> None:
        super().__init__(max_calls, "fedpax-call")
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._unfinished = 0
        # By thread: how to end the calls that wait for their peers, the longest wait first.
        self._waiting: dict[int, Callable[[], object]] = {}
        self._ended: set[int] = set()  # threads whose call was ended and has not returned yet

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """Handle a call in a thread; see `concurrent.futures.Executor.submit`."""
        with self._lock:
            self._unfinished += 1
            self._make_room()
        return super().submit(self._run, fn, *args, **kwargs)

    @contextlib.contextmanager
    def waits_for_peer(self, end: Callable[[], object]) -> Iterator[None]:
        """Mark the call of this thread as waiting for its peer."""
        # `end` ends the call in another thread, and must not block.
        thread = threading.get_ident()
        with self._lock:
            self._waiting[thread] = end
            self._make_room()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(thread, None)

    def receive(self, chunks: Iterator[bytes], end: Callable[[], object]) -> Iterator[bytes]:
        """Yield the chunks of a peer, and wait for each of them as `waits_for_peer`."""
        while True:
            with self.waits_for_peer(end):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def send(self, chunks: Iterator[bytes], end: Callable[[], object]) -> Iterator[bytes]:
        """Yield the chunks for a peer, and wait until each is read as `waits_for_peer`."""
        for chunk in chunks:
            with self.waits_for_peer(end):
                yield chunk

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        finally:
            with self._lock:
                self._unfinished -= 1
                self._ended.discard(threading.get_ident())

    def _make_room(self) -> None:
        if self._waiting and self._unfinished - len(self._ended) > self._max_calls:
            thread = next(iter(self._waiting))
            self._ended.add(thread)
            self._waiting.pop(thread)()


class CallsBySite:
    """Counts the calls that each site has at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock, self._calls = threading.Lock(), Counter[str]()

    @contextlib.contextmanager
    def count(self, site: str) -> Iterator[bool]:
        """Count a call while it runs; yields whether the site has no more than it may have."""
        with self._lock:
            self._calls[site] += 1
            fits = not site or self._calls[site] <= self._most
        try:
            yield fits
        finally:
            with self._lock:
                self._calls[site] -= 1
                if not self._calls[site]:
                    del self._calls[site]


# ---- a log of strangers' messages: they can neither fill it nor send control characters to it

_MOST_REMEMBERED = 1000
_INTERVAL = 10.0  # seconds


class LimitedLog:
    """A log of at most `most` warnings per interval, each once within `remember` seconds."""

    def __init__(
        self,
        logger: logging.Logger,
        most: int = 20,
        remember: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._most, self._clock = logger, most, clock
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
                self._end, self._count = now + _INTERVAL, 0
            self._count += 1
            if self._count > self._most:
                return
        if missing > 0:
            self._logger.warning("%d more warnings in %g s were not written", missing, _INTERVAL)
        self._logger.warning("%s", text)


def escape(words: str) -> str:
    """Escape control characters, which could change a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
