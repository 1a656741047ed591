"""A connection that carries a JSON value per line."""

import json
import socket
import time
from typing import Any


class Lines:
    """A socket that carries a JSON value per line, in both directions.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        self.connection = connection
        self._rest = b""
        self.heard = time.monotonic()
        self.closed = False

    def send(self, **message: Any) -> None:
        """Send a message; a connection that fails counts as closed."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[dict[str, Any]]:
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
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(self._rest) > 65536 or not all(isinstance(one, dict) for one in messages):
            self.closed = True  # a stranger
            return []
        return messages
