"""Connections that carry a JSON value per line, from processes that may be strangers."""

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Generator
from typing import Any

LONGEST_LINE = 65536
MOST_STRANGERS = 128
"""Connections without a first message that a listener keeps. Beyond them it closes the oldest."""

JsonLine = dict[str, Any]


def parse_line(line: bytes) -> JsonLine | None:
    """Parse a line; None if it holds no JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: deeply nested
        return None
    return message if isinstance(message, dict) else None


def printable(value: Any) -> str:
    """Return a name from a message, short and without control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value)[:100])


def listen_on(port: int, num_processes: int) -> socket.socket:
    """Listen on all addresses of this host, in both versions of IP where it has both."""
    backlog = max(num_processes, MOST_STRANGERS)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", port), backlog=backlog)


class JsonLineSocket:
    """A socket that carries a JSON value per line, in both directions."""

    # It is `closed` when the connection has ended, or the other side is a stranger.

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        self.connection = connection
        self._rest = b""
        self.began = self.heard = time.monotonic()
        self.closed = False

    def send(self, **message: Any) -> None:
        """Send a message; a connection that fails counts as closed."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[JsonLine]:
        """Return the messages that have arrived, when the socket is readable."""
        try:
            part = self.connection.recv(65536)
        except OSError:
            part = b""
        if not part:
            self.closed = True
            return []
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + part).split(b"\n")
        parsed = [parse_line(line) for line in lines]
        messages = [message for message in parsed if message is not None]
        if len(self._rest) > LONGEST_LINE or len(messages) < len(parsed):
            self.closed = True  # a stranger
            return []
        return messages


class _FirstLine:
    """The first line of a connection; nothing that follows the line is read."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection, self.deadline, self._text = connection, deadline, b""

    def read(self) -> JsonLine | None:
        """Read what has arrived: the message, {} if there will be none, None if it is not whole."""
        try:
            part = self.connection.recv(LONGEST_LINE, socket.MSG_PEEK)
            end = part.find(b"\n") + 1
            self._text += self.connection.recv(end or len(part)) if part else b""
        except OSError:
            return {}
        if end:
            return parse_line(self._text) or {}
        return {} if not part or len(self._text) > LONGEST_LINE else None


def read_line(connection: socket.socket, seconds: float) -> JsonLine:
    """Return the first message of a connection; {} if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    line = _FirstLine(connection, deadline)
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        if (message := line.read()) is not None:
            return message
    return {}


def greetings(
    server: socket.socket, deadline: float, seconds: float
) -> Generator[tuple[socket.socket, JsonLine], None, None]:
    """Accept connections until `deadline`; yield each one, left open, with its message."""
    # A slow connection delays no other. The message is {} for a line of something else.
    waiting: dict[socket.socket, _FirstLine] = {}  # the oldest first
    server.setblocking(False)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        stack.callback(lambda: close(*waiting))
        selector.register(server, selectors.EVENT_READ)

        def forget(connection: socket.socket) -> socket.socket:
            selector.unregister(connection)
            del waiting[connection]
            return connection

        def close(*connections: socket.socket) -> None:
            for connection in connections:
                forget(connection).close()

        while (now := time.monotonic()) < deadline:
            close(*[client for client, line in waiting.items() if line.deadline <= now])
            until = min([deadline, *(line.deadline for line in waiting.values())])
            ready = [key.fileobj for key, _ in selector.select(until - now)]
            for connection in [client for client in waiting if client in ready]:
                if (message := waiting[connection].read()) is not None:
                    yield forget(connection), message
            if server in ready:
                full = len(waiting) >= MOST_STRANGERS
                try:
                    connection, _ = server.accept()
                except BlockingIOError:  # it is gone
                    continue
                except OSError:  # too many files are open
                    full = True
                    time.sleep(0.01)
                else:
                    waiting[connection] = _FirstLine(connection, time.monotonic() + seconds)
                    selector.register(connection, selectors.EVENT_READ)
                if full and waiting:
                    close(next(iter(waiting)))
