"""Long files of lines: read in pieces, and stored in parts in a folder where files cannot grow.

A part has the file's name and the position of its first byte, such as `metrics.jsonl.2097152`.
"""

import contextlib
import errno
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from fedpax.errors import ConfigurationError
from fedpax.files import (
    LINES_BYTES,
    UnusableFileError,
    check_fetched,
    describe_no_permission,
    open_regular,
    parse_json,
    read_file,
    read_json,
    replace_file,
    replacing,
)
from fedpax.run_files.paths import is_remote

CHUNK_BYTES = 1 << 20
PART_BYTES = 1 << 18
PARTS_MERGED = 8
TAIL_BYTES = 1 << 12


def read_chunks(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file and its further parts, in pieces of at most `CHUNK_BYTES`."""
    part, begin = path, 0
    while begin == 0 or part.exists():
        status: Any = part.stat()
        size = status.length if is_remote(part) else status.st_size
        if begin + size > LINES_BYTES:  # before it is read: a sparse file can have terabytes
            reason = f"it has {begin + size} bytes, expected at most {LINES_BYTES}"
            raise UnusableFileError(errno.EINVAL, reason, str(path))
        read = min(size, max(0, start - begin))
        for chunk in _read_part(part, read):
            yield chunk
            read += len(chunk)
        if not read:
            return
        begin += read
        part = path.with_name(f"{path.name}.{begin}")


def _read_part(part: Path, start: int) -> Iterator[bytes]:
    if is_remote(part):
        content = read_file(part)
        for i in range(start, len(content), CHUNK_BYTES):
            yield content[i : i + CHUNK_BYTES]
        return
    check_fetched(part)
    with open_regular(part) as file:
        file.seek(start)
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def read_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    r"""Yield the lines of a file, without the text after the last newline."""
    pieces: list[bytes] = []  # of a line that can be longer than a chunk
    for chunk in read_chunks(path, start):
        first, *lines = chunk.split(b"\n")
        pieces.append(first)
        if lines:
            yield b"".join(pieces)
            *whole, rest = lines
            yield from whole
            pieces = [rest]


def read_ranges(path: Path, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes of ranges of a file, in pieces."""
    for start, end in ranges:
        for chunk in read_chunks(path, start):
            yield chunk[: end - start]
            start += len(chunk)
            if start >= end:
                break


def replace_by(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file from pieces, such that a kill leaves the old or the new content."""
    with replacing(path) as file:
        file.writelines(chunks)


def part_starts(size: int) -> list[int]:
    """Return where the parts of a file begin: each byte is written O(log size) times."""
    whole, starts, at = size // PART_BYTES, [], 0
    span = 1
    while span * PARTS_MERGED <= whole:
        span *= PARTS_MERGED
    while span:
        while at + span <= whole:
            starts.append(at * PART_BYTES)
            at += span
        span //= PARTS_MERGED
    if at * PART_BYTES < size or not starts:
        starts.append(at * PART_BYTES)
    return starts


class LineCopy:
    """The copy of a growing file in another folder, such as one in a bucket."""

    def __init__(self, source: Path, target: Path, record: Path) -> None:
        self._source, self._target, self._record = source, target, record
        self._parts: dict[int, tuple[int, int]] | None = None  # start -> (bytes, CRC-32)
        self._tail = 0, b""  # size of the file, and its last bytes

    def update(self) -> None:
        """Write the parts that have changed."""
        if not self._source.exists():
            return
        known, is_first = self._parts, self._parts is None
        if known is None:
            known = self._recorded()
        with open_regular(self._source) as file:
            size = os.fstat(file.fileno()).st_size
            starts = part_starts(size)
            # A file that was shortened and has grown again differs before its former end, whose
            # last byte can be equal by chance.
            changed = is_first or self._tail != _tail(file, self._tail[0])
            parts = {}
            for start, end in itertools.pairwise([*starts, size]):
                same = known.get(start)
                if same is not None and same[0] == end - start:
                    if not changed or _is_same(file, start, same):
                        parts[start] = same
                        continue
                file.seek(start)
                content = file.read(end - start)
                self._write(start, content)
                parts[start] = len(content), zlib.crc32(content)
            self._tail = _tail(file, size)
        names = self._names() if is_first else known
        for start in sorted(names - parts.keys(), reverse=True):
            self._part(start).unlink(missing_ok=True)
        self._parts = parts
        with contextlib.suppress(OSError):  # the next process writes all parts again
            replace_file(self._record, json.dumps(parts).encode(), sync=False)

    def _part(self, start: int) -> Path:
        name = self._target.name
        return self._target.with_name(f"{name}.{start}") if start else self._target

    def _write(self, start: int, content: bytes) -> None:
        if is_remote(self._target):
            self._part(start).write_bytes(content)
        else:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._part(start), content)

    def _names(self) -> set[int]:
        ends = (
            path.name.rpartition(".")[2]
            for path in self._target.parent.iterdir()
            if path.name.startswith(f"{self._target.name}.")
        )
        return {int(end) for end in ends if end.isdecimal()}

    def _recorded(self) -> dict[int, tuple[int, int]]:
        try:
            content = read_json(self._record)
            parts = {int(start): (int(size), int(crc)) for start, (size, crc) in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
        return {start: part for start, part in parts.items() if self._part(start).exists()}


def _tail(file: BinaryIO, size: int) -> tuple[int, bytes]:
    """Return a size and the last bytes that a file of this size has."""
    file.seek(max(0, size - TAIL_BYTES))
    return size, file.read(min(size, TAIL_BYTES))


def _is_same(file: BinaryIO, start: int, part: tuple[int, int] | None) -> bool:
    """Return whether a part of a file has the size and the checksum of a part of its copy."""
    if part is None:
        return False
    file.seek(start)
    content = file.read(part[0])
    return len(content) == part[0] and zlib.crc32(content) == part[1]


# ---- files with one JSON object per line, of which a kill or a disk can damage some lines


@contextlib.contextmanager
def explain_unreadable(path: PurePath, expectation: str) -> Iterator[None]:
    """Raise a ConfigurationError for a file of a run that cannot be read."""
    try:
        yield
    except PermissionError as error:
        raise ConfigurationError(describe_no_permission(path)) from error
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror}), {expectation}"
        ) from error


def read_json_lines(
    path: Path, is_whole: Callable[[Any], bool], expectation: str
) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the undamaged lines of a file; text after the last newline is not damage."""
    lines: list[dict[str, Any]] = []
    damaged: list[int] = []
    with explain_unreadable(path, expectation):
        if not path.exists():
            return lines, damaged
        content = read_file(path, LINES_BYTES)
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            line = parse_json(text)
        except ValueError:
            line = None
        if is_whole(line):
            lines.append(line)
        else:
            damaged.append(number)
    return lines, damaged


def name_lines(numbers: Sequence[int]) -> str:
    """Format the numbers of lines for a message."""
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
