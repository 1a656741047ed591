"""The fork server of a host in an elastic job, from which its training processes are forked.

It is forked from the supervisor, so the experiment's modules are imported once per host. It imports
the libraries for data, and uses no device. A training process that is forked from it begins
in milliseconds, and shares the memory of the modules.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fedpax.processes.json_lines import Lines

LIBRARIES = (
    "grain",
    "tensorflow_datasets.core",
    "tensorflow_datasets.public_api",
)
"""Modules that a training process imports when it needs them first."""

TICK = 0.02


class ForkServer:
    """A fork server, as its supervisor sees it.

    Attributes:
        pid: the process of the server.
        lines: the connection; readable when the training process has ended.
        training: the training process that runs, or None.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.lines = pid, Lines(connection)
        self.training: int | None = None
        self._messages: list[dict[str, Any]] = []

    def is_ready(self, timeout: float) -> bool:
        """Wait until the server has imported all, or has ended.

        Args:
            timeout: seconds to wait.
        """
        return self._next(timeout) is not None or self.lines.closed

    def train(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a training process.

        Args:
            arguments: further arguments of `fedpax train`.
            environment: variables to set.
        """
        self.lines.send(arguments=list(arguments), environment=dict(environment))
        while (message := self._next(1.0)) is None and not self.lines.closed:
            pass
        self.training = None if message is None else message["started"]

    def poll(self) -> int | None:
        """Return the status of the training process when it has ended, once; negative: a signal."""
        message = None if self.training is None else self._next(0.0)
        if message is None:
            return None
        self.training = None
        return int(message["ended"])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the training process, if it runs."""
        if self.training is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.training, number)

    def close(self) -> None:
        """End the server and the training process, and wait until they have ended."""
        self.signal(signal.SIGKILL)
        self.lines.connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _next(self, timeout: float) -> dict[str, Any] | None:
        connection = self.lines.connection
        if not self._messages and select.select([connection], [], [], timeout)[0]:
            self._messages += self.lines.receive()
        return self._messages.pop(0) if self._messages else None


def fork_server() -> ForkServer | list[str]:
    """Fork a server. The training processes return from this function too.

    Returns:
        In the supervisor the server. In a training process further arguments of `fedpax train`; its
        environment variables are set.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return ForkServer(pid, ours)
    ours.close()
    os.setsid()  # the supervisor alone receives Ctrl-C
    signal.set_wakeup_fd(-1)  # that of the supervisor
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _end_with_parent(supervisor)
    return _serve(Lines(theirs))


def _serve(lines: Lines) -> list[str]:
    """Fork training processes until the supervisor closes its connection."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection does not copy the shared memory
    lines.send(ready=True)
    server, child = os.getpid(), 0
    while not lines.closed:
        readable = select.select([lines.connection], [], [], TICK if child else None)[0]
        for message in lines.receive() if readable else ():
            child = os.fork()
            if not child:
                lines.connection.close()
                _end_with_parent(server)
                os.environ.update(message["environment"])
                arguments: list[str] = message["arguments"]
                return arguments
            lines.send(started=child)
        if child:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                lines.send(ended=os.waitstatus_to_exitcode(status))
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os._exit(0)


def _end_with_parent(parent: int) -> None:
    """Make Linux kill this process when its parent ends, so that it never trains unsupervised."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)
