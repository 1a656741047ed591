"""Silence for what a failed save of Orbax prints in addition to the error that it raises."""

import logging
import sys
from contextlib import AbstractContextManager
from typing import Any

# A part of the path of every checkpoint that is not complete.
DRAFT = "orbax-checkpoint-tmp"


class QuietFailedSaves(AbstractContextManager["QuietFailedSaves"]):
    """A context manager that hides the tracebacks which follow the first error of a save.

    Orbax writes arrays concurrently. The first error is raised. The others appear as tracebacks:
    in Orbax's log; as exceptions of asyncio that were not retrieved; and as callbacks of
    TensorStore to an event loop that is closed by then. All other messages remain.

    The last two can come late, so after an error this object stays in effect.
    """

    def __enter__(self) -> "QuietFailedSaves":
        """Start to hide them."""
        self._former_hook = sys.unraisablehook
        sys.unraisablehook = self._hook
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_no_failed_save)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop to hide them, unless there was an error."""
        if kind is not None:
            return
        sys.unraisablehook = self._former_hook
        for name in ("absl", "asyncio"):
            logging.getLogger(name).removeFilter(_is_no_failed_save)

    def _hook(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
            return
        self._former_hook(unraisable)


def _is_no_failed_save(record: logging.LogRecord) -> bool:
    if record.exc_info is None:
        return True
    return "orbax" not in record.pathname and DRAFT not in f"{record.exc_info[1]}"
