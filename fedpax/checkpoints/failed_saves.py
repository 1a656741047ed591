"""Silence for what a failed save of Orbax prints in addition to the error that it raises."""

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# A part of the path of every checkpoint that is not complete.
DRAFT = "orbax-checkpoint-tmp"
LOGGERS = ("absl", "asyncio")


class QuietFailedSaves(AbstractContextManager["QuietFailedSaves"]):
    """A context manager that hides the tracebacks which follow the first error of a save.

    Orbax writes arrays concurrently. The first error is raised. The others appear as tracebacks:
    in Orbax's log; as exceptions of asyncio that were not retrieved; and as callbacks of
    TensorStore to an event loop that is closed by then. All other messages remain.

    The last two can come late, so after an error this object stays in effect. Objects of several
    threads share one hook, which the last one removes.
    """

    _lock = threading.Lock()
    _in_effect = 0
    _former_hook: Callable[[Any], object] = sys.__unraisablehook__

    def __enter__(self) -> "QuietFailedSaves":
        """Start to hide them."""
        shared = QuietFailedSaves
        with shared._lock:
            shared._in_effect += 1
            if sys.unraisablehook is not _hook:
                shared._former_hook, sys.unraisablehook = sys.unraisablehook, _hook
            for name in LOGGERS:
                logging.getLogger(name).addFilter(_is_no_failed_save)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop to hide them, unless there was an error."""
        if kind is not None:
            return
        shared = QuietFailedSaves
        with shared._lock:
            shared._in_effect -= 1
            if shared._in_effect:
                return
            if sys.unraisablehook is _hook:
                sys.unraisablehook = shared._former_hook
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(_is_no_failed_save)


def _hook(unraisable: Any) -> None:
    error = unraisable.exc_value
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        return
    QuietFailedSaves._former_hook(unraisable)


def _is_no_failed_save(record: logging.LogRecord) -> bool:
    if record.exc_info is None:
        return True
    return "orbax" not in record.pathname and DRAFT not in f"{record.exc_info[1]}"
