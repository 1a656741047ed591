"""Packets between a server and its nodes, over a socket.

No import of JAX: a process that only forwards packets starts sooner.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LARGEST_HEADER = 1 << 20
_LARGEST_TEXT = 2000


class Packet(NamedTuple):
    """A packet."""

    values: Mapping[str, Any]
    arrays: Sequence[bytes] = ()


def send(connection: socket.socket, packet: Packet) -> None:
    """Send a packet over a socket."""
    header = {"values": dict(packet.values), "sizes": [len(x) for x in packet.arrays]}
    text = json.dumps(header).encode()
    connection.sendall(struct.pack("!Q", len(text)) + text)
    for array in packet.arrays:
        connection.sendall(array)


def receive(connection: socket.socket) -> Packet:
    """Receive a packet from a socket."""
    (size,) = struct.unpack("!Q", _read(connection, 8))
    if size > _LARGEST_HEADER:
        raise ConnectionError(f"A header of {size} bytes, expected at most {_LARGEST_HEADER}.")
    header = json.loads(_read(connection, size))
    return Packet(header["values"], [_read(connection, n) for n in header["sizes"]])


def one_line(text: Any) -> str:
    """Return a text of another process as one line, for a log that is read by lines."""
    printable = "".join(c if c.isprintable() else " " for c in str(text)[:_LARGEST_TEXT])
    return " ".join(printable.split())


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError(f"The connection ended {len(view)} bytes early.")
        view = view[count:]
    return bytes(content)
