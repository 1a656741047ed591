"""An append-only file of messages, of which each is on the disk before `append` returns."""

import contextlib
import itertools
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedpax.files import open_regular, open_unlinked
from fedpax.transport.message import (
    CHECKSUM_BYTES,
    CHUNK_BYTES,
    Message,
    MessageError,
    decode,
    encode,
)

_LENGTH_BYTES, _CHUNK_LENGTH_BYTES = 8, 4
_HEAD_BYTES = _LENGTH_BYTES + CHECKSUM_BYTES
_COUNT_BYTES = 4
START = _COUNT_BYTES + CHECKSUM_BYTES
"""The position of the first record, after the count of records."""


class Record(NamedTuple):
    """A message of a journal."""

    message: Message
    end: int  # the position after it, in bytes


class Journal:
    """A file to which messages are appended, with one flush to the disk for each."""

    # The file begins with the number of its records, 4 bytes, and its CRC-32, written after the
    # record: a process that is killed can leave one record more, and a file with fewer was cut. A
    # record is the length of its content, 8 bytes, the CRC-32 of the length, and the chunks of the
    # message, each after its length in 4 bytes. What follows `end` is removed.

    def __init__(self, path: Path, end: int = 0, records: int = 0) -> None:
        self.path, self._records = path, records
        self.flushes = self.written_bytes = 0
        is_new = not path.exists()
        self._file = open_unlinked(path, os.O_RDWR | os.O_CREAT)
        self._end = max(end, START)
        os.ftruncate(self._file, end)
        self._count()
        if is_new:
            flush_folder(path.parent)
            self.flushes += 1

    def append(self, *messages: Message) -> None:
        """Append messages and flush them to the disk; after an error the file is as before."""
        end = self._end
        try:
            for message in messages:
                end += self._write(message)
            os.fdatasync(self._file) if hasattr(os, "fdatasync") else os.fsync(self._file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
                os.lseek(self._file, self._end, os.SEEK_SET)
            raise
        self.flushes += 1
        self.written_bytes += end - self._end
        self._end = end
        self._records += len(messages)
        with contextlib.suppress(OSError):  # the records are on the disk
            self._count()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _count(self) -> None:
        """Write the number of records."""
        count = self._records.to_bytes(_COUNT_BYTES, "little")
        os.lseek(self._file, 0, os.SEEK_SET)
        try:
            self._write_all(count + zlib.crc32(count).to_bytes(CHECKSUM_BYTES, "little"))
        finally:
            os.lseek(self._file, self._end, os.SEEK_SET)

    def _write(self, message: Message) -> int:
        size = sum(array.nbytes for array in message.arrays.values())
        chunks = encode(message, size)
        first = next(chunks)
        full = math.ceil(size / CHUNK_BYTES)  # all but the last of them
        length = len(first) + size + full * CHECKSUM_BYTES + (1 + full) * _CHUNK_LENGTH_BYTES
        head = length.to_bytes(_LENGTH_BYTES, "little")
        self._write_all(head + zlib.crc32(head).to_bytes(CHECKSUM_BYTES, "little"))
        for chunk in itertools.chain([first], chunks):
            self._write_all(len(chunk).to_bytes(_CHUNK_LENGTH_BYTES, "little") + chunk)
        return _HEAD_BYTES + length

    def _write_all(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._file, rest) :]


def read_journal(path: Path) -> Iterator[Record]:
    """Read the complete records of a journal; raise a MessageError if one is damaged or missing."""
    with open_regular(path) as file:
        head = file.read(START)
        if len(head) < START:
            return  # the process was killed when it made the file
        if (
            zlib.crc32(head[:_COUNT_BYTES]).to_bytes(CHECKSUM_BYTES, "little")
            != head[_COUNT_BYTES:]
        ):
            raise MessageError("the number of its records does not have its checksum")
        records, count = int.from_bytes(head[:_COUNT_BYTES], "little"), 0
        for record in _read_records(file, path.stat().st_size):
            count += 1
            yield record
    if count < records:
        raise MessageError(
            f"it has {count} of its {records} records: the end of the file is missing"
        )


def _read_records(file: BinaryIO, size: int) -> Iterator[Record]:
    """Read the complete records of the first `size` bytes."""
    end = START
    while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
        length = int.from_bytes(head[:_LENGTH_BYTES], "little")
        checksum = zlib.crc32(head[:_LENGTH_BYTES]).to_bytes(CHECKSUM_BYTES, "little")
        if head[_LENGTH_BYTES:] != checksum:
            raise MessageError(f"the record at byte {end} does not have its checksum")
        if end + _HEAD_BYTES + length > size:
            return
        message = decode(_read_chunks(file, length), max_bytes=length)
        end += _HEAD_BYTES + length
        yield Record(message, end)


def _read_chunks(file: BinaryIO, length: int) -> Iterator[bytes]:
    while length > 0:
        size = int.from_bytes(file.read(_CHUNK_LENGTH_BYTES), "little")
        length -= _CHUNK_LENGTH_BYTES + size
        yield file.read(min(size, length + size))


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, so that a new file survives a power failure."""
    if os.name == "nt":
        return  # a folder cannot be opened
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
