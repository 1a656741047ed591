"""Notices that the process is asked to stop, so that the training can save first."""

import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Interruption:
    """Turns SIGTERM and the first Ctrl-C into a question that the loop asks once a round.

    A context manager: the handlers that were there before are put back at its end. A second
    Ctrl-C raises ``KeyboardInterrupt`` at once. Where ``jax.distributed`` runs, JAX's own
    preemption service takes SIGTERM and makes every process stop after the same round. Outside
    the main thread, where Python allows no handlers, nothing is noticed.

    Attributes:
        signal: the signal that was received, if any.

    Example:
        >>> import os
        >>> with Interruption() as interruption:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     interruption.reached(round_number=1)
        True
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._distributed = jax.distributed.is_initialized()
        self._previous: dict[signal.Signals, Any] = {}

    def reached(self, round_number: int) -> bool:
        """Says whether to stop now; every process must ask with the same round numbers.

        Args:
            round_number: the number of rounds that are done.

        Returns:
            Whether the run must save and stop.
        """
        if not self._distributed:
            return self.signal is not None
        if multihost_utils.reached_preemption_sync_point(round_number):
            self.signal = signal.SIGTERM
            return True
        return False

    def __enter__(self) -> "Interruption":
        """Installs the handlers."""
        if not self._distributed and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        """Puts back the handlers that were there."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def run_process(command: Sequence[str]) -> int:
    """Runs a process that trains, and leaves it to it how to stop when this one is asked to.

    SIGTERM is passed on. Ctrl-C is not: a terminal sends it to both processes.

    Args:
        command: the program and its arguments.

    Returns:
        Its exit status; 128 and the signal's number if a signal ended it.

    Example:
        >>> import sys
        >>> run_process([sys.executable, "-c", "raise SystemExit(3)"])
        3
    """
    process = subprocess.Popen(command)
    handlers: dict[signal.Signals, Any] = {
        signal.SIGTERM: lambda number, frame: process.send_signal(number),
        signal.SIGINT: lambda number, frame: None,
    }
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
