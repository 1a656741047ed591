"""The training process of a host in an elastic job, which ends when its supervisor ends."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence


class TrainingProcess:
    """The training process of a supervisor: `fedpax train` with these arguments and variables."""

    # Its input is a pipe that only the supervisor can write to. It is closed when the supervisor
    # ends, also by SIGKILL, and ends the training process (`end_with_supervisor`).

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedpax", "train", *arguments],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            start_new_session=True,  # the supervisor alone receives Ctrl-C
        )

    def poll(self) -> int | None:
        """Return the exit status if the process has ended; 128 + signal if a signal ended it."""
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def end_with_supervisor() -> None:
    """Kill this training process when its supervisor ends, so that it never trains unsupervised."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="supervisor", daemon=True).start()
