"""Preemption: stop a run on SIGTERM or Ctrl-C, and save it first if there is anything to save.

JAX is imported inside the functions: the command line handles signals before it loads JAX.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from fedpax.console import print_error

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class PreemptionGuard:
    """A context manager that turns SIGTERM and the first Ctrl-C into a stop after the round."""

    # With `jax.distributed`, every process stops after the same round. Python allows handlers in
    # the main thread only.

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        import jax

        self._distributed = jax.distributed.is_initialized()
        self._asked = False
        self._acknowledged: set[int] = set()  # the thread's own record
        self._watch: Any = None

    def should_stop(self, round_number: int) -> bool:
        """Return whether to save and stop now."""
        if not self._distributed:
            return self.signal is not None
        from jax.experimental import multihost_utils

        reached = multihost_utils.reached_preemption_sync_point
        # JAX makes all processes stop one round after the latest that one has asked about, 0 at
        # first: a signal before the first round of a resumed run means round 1, which has passed.
        passed = round_number > 0 and not self._asked and reached(1)
        self._asked = True
        stop = reached(round_number) or passed
        if stop and self.signal is None:
            self.signal = signal.SIGTERM
        return stop

    def __enter__(self) -> "PreemptionGuard":
        """Install the handlers."""
        signals = (signal.SIGINT,) if self._distributed else SIGNALS
        self._watch = _watch_signals(self._receive, self._acknowledge, signals)
        self._watch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the former handlers."""
        self._watch.__exit__(None, None, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._distributed:
                os.kill(os.getpid(), signal.SIGTERM)

    def _acknowledge(self, number: int) -> None:
        is_first, repeated = not self._acknowledged, number in self._acknowledged
        self._acknowledged.add(number)
        if number == signal.SIGINT and repeated:
            _print_signal(number, "stopping without saving.")
            return
        if number == signal.SIGTERM and not is_first:
            return  # it changes nothing
        again = " Press Ctrl-C again to stop without saving." if number == signal.SIGINT else ""
        _print_signal(number, f"stopping after the current round, then saving.{again}")


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and Ctrl-C at once, with status 128 + signal: nothing needs saving."""
    # For the time before and after the training loop, such as imports and compilation.

    def stop(number: int) -> NoReturn:
        # Not an exception: imports and callbacks may catch it, and compiled code delays it.
        _print_signal(number, "stopped; there was nothing to save.")
        os._exit(128 + number)

    with _watch_signals(lambda number, frame: None, stop):
        yield


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay the `KeyboardInterrupt` of the first Ctrl-C to the end of the block."""
    # For imports in a notebook's kernel: after an interrupted import, JAX cannot be imported again.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the handler of a caller
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


def _print_signal(number: int, text: str) -> None:
    below_the_progress_bar = "\n" if sys.stderr.isatty() else ""
    print_error(f"{below_the_progress_bar}fedpax: {signal.Signals(number).name}: {text}")


@contextmanager
def _watch_signals(
    handler: Callable[[int, FrameType | None], None],
    acknowledge: Callable[[int], None],
    signals: Sequence[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Handle the signals in the main thread, and acknowledge them at once in a thread."""
    # Python runs a handler only when compiled code, such as XLA's compiler, has returned. It writes
    # the signal's number to a file immediately.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while numbers := os.read(reader, 1):
            if numbers[0] in signals:
                acknowledge(numbers[0])

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, handler) for number in signals}
    former_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former_writer)
        for number, former in before.items():
            signal.signal(number, former)
        os.close(writer)
        thread.join()
        os.close(reader)


def run_subprocess(command: Sequence[str]) -> int:
    """Run a process that trains, forward SIGTERM and Ctrl-C as SIGTERM, and return its status."""
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        repeated = number in received
        received.append(number)
        if process is not None and not (number == signal.SIGINT and repeated):
            process.terminate()

    with _watch_signals(forward, lambda number: None):
        process = subprocess.Popen(command)
        if received:  # before the process was there
            process.terminate()
        status = process.wait()
    status = status if status >= 0 else 128 - status
    if received and status == 128 + signal.SIGTERM:
        return 128 + received[0]
    return status
