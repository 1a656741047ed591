"""The training process of an elastic job, started before it is needed.

With the environment variable `READY`, `fedpax train` first imports what the experiment needs,
writes a byte to a file descriptor, and waits for a line of JSON on standard input: more arguments
and environment variables. Then it trains. It uses no device before. If standard input ends, it ends
too.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

DATA_LIBRARIES = ("grain", "tensorflow_datasets.core", "tensorflow_datasets.public_api")
"""Modules that data sets import when they are first read."""

READY = "FEDPAX_STANDBY_READY"
"""The environment variable with the number of the file descriptor."""


class Standby:
    """A training process that waits, as its supervisor sees it.

    Args:
        arguments: the arguments of `fedpax train` that are known already.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        reader, writer = os.pipe()
        # In a session of its own: the supervisor alone receives Ctrl-C.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedpax", "train", *arguments],
            stdin=subprocess.PIPE,
            env=os.environ | {READY: str(writer)},
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        self._reader: int | None = reader

    def is_ready(self, timeout: float) -> bool:
        """Wait until the process has imported all, or has ended.

        Args:
            timeout: seconds to wait.

        Returns:
            True if it waits for `train`, or has ended.
        """
        if self._reader is not None:
            if not select.select([self._reader], [], [], timeout)[0]:
                return False
            os.close(self._reader)
            self._reader = None
        return True

    def train(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Make the process train.

        Args:
            arguments: further arguments of `fedpax train`.
            environment: variables to set.

        Returns:
            The process. If it has ended already, the supervisor notices its exit status.
        """
        assert self.process.stdin is not None
        order = {"arguments": list(arguments), "environment": dict(environment)}
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.close()
        self._forget()
        return self.process

    def close(self) -> None:
        """End the process."""
        self._forget()
        self.process.kill()
        self.process.wait()

    def _forget(self) -> None:
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None


def _end_with_parent() -> None:
    """Make Linux kill this process when its parent ends, so that it never trains unsupervised.

    If the parent has ended before, standard input has ended too.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def is_standby() -> bool:
    """Return whether this process is one that waits for its supervisor."""
    return READY in os.environ


def wait_for_order() -> list[str]:
    """Import the libraries for data, then wait until the supervisor wants this process to train.

    Returns:
        Further arguments of `fedpax train`; the environment variables are set. If the supervisor
        has ended, this process ends.
    """
    _end_with_parent()
    for name in DATA_LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ready = int(os.environ.pop(READY))
    with contextlib.suppress(OSError):  # the supervisor does not wait
        os.write(ready, b"1")
    os.close(ready)
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    order = json.loads(line)
    os.environ.update(order["environment"])
    arguments: list[str] = order["arguments"]
    return arguments
