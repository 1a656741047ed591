"""Messages in files: the chunks of `transport.message`, each behind its length."""

import struct
from collections.abc import Iterator
from pathlib import Path

from fedpax.files import read_file, replace_file
from fedpax.transport.message import ChecksumError, Message, decode, encode

LARGEST = 1 << 36
"""The largest file that is read, in bytes."""

_LENGTH = struct.Struct("<I")


def write_message(path: Path, message: Message, *, sync: bool = True) -> int:
    """Write a message in place of a file, and return its number of bytes."""
    chunks = encode(message, 1 << 62)
    content = b"".join(_LENGTH.pack(len(chunk)) + chunk for chunk in chunks)
    replace_file(path, content, sync=sync)
    return len(content)


def read_message(path: Path) -> Message:
    """Read a message that `write_message` wrote; raises a `MessageError` if it is damaged."""
    content = read_file(path, LARGEST)
    return decode(_chunks(content), len(content))


def _chunks(content: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(content):
        if place + _LENGTH.size > len(content):
            raise ChecksumError("the file ends inside a length. Restore it from a copy.")
        (length,) = _LENGTH.unpack_from(content, place)
        place += _LENGTH.size
        if place + length > len(content):
            raise ChecksumError("the file ends inside a chunk. Restore it from a copy.")
        yield content[place : place + length]
        place += length
