"""The lines of a run's `metrics.jsonl`, of which long files are read without parsing every line.

Of bytes with the checksum of a checkpoint, only chosen lines are parsed.
"""

import functools
import itertools
import json
import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedpax.files import parse_json, read_json, replace_file
from fedpax.run_files.line_files import (
    CHUNK_BYTES,
    explain_unreadable,
    read_chunks,
    read_lines,
)
from fedpax.run_files.paths import METRICS, METRICS_SUMS

LAST_ROUNDS = 1 << 13
"""Number of the newest rounds whose lines a run that resumes reads: many times a spike's window."""
SPREAD_ROUNDS = 10_000
"""Least number of rounds of a long run that tables and pictures read, evenly spread."""
SUMS_REMEMBERED = 64
KIND_AT = len('{"kind": "')
"""Position of the first letter of a line's kind, as `MetricsWriter` writes it."""
CODE_LETTERS = 3
EXPECTATION = (
    "expected the file that `fedpax train` writes. Move it away to train on without the earlier "
    "metrics, or restore it."
)


class Sum(NamedTuple):
    """The first bytes of `metrics.jsonl` at a checkpoint: number, CRC-32, largest round."""

    bytes: int = 0
    crc: int = 0
    round: int = 0


class MetricsLog(NamedTuple):
    """Lines of `metrics.jsonl`."""

    lines: list[dict[str, Any]]  # the chosen lines that are whole, in their order
    damaged: list[int]  # the numbers of the damaged lines, from 1
    # the ranges of bytes of the lines that are whole and that `keep` keeps
    kept: list[tuple[int, int]]
    sum: Sum  # the sum of these bytes


class Choice:
    """A choice of the lines of one kind: all of them."""

    def __init__(self) -> None:
        self._chosen: list[tuple[int, Any]] = []

    def add(self, numbers: Sequence[int], line: Callable[[int], Any]) -> None:
        """Add lines with these numbers in the file; `line(i)` returns the i-th of them."""
        self._chosen.extend((number, line(i)) for i, number in enumerate(numbers))

    def lines(self) -> list[tuple[int, Any]]:
        """Return the chosen lines with their numbers."""
        return self._chosen


class LastLines(Choice):
    """The last lines."""

    def __init__(self, count: int) -> None:
        self._most, self._count = count, 0
        self._blocks: deque[tuple[Sequence[int], Callable[[int], Any]]] = deque()

    def add(self, numbers: Sequence[int], line: Callable[[int], Any]) -> None:
        """Add lines, and forget blocks of lines that are not among the last ones."""
        self._blocks.append((numbers, line))
        self._count += len(numbers)
        while self._count - len(self._blocks[0][0]) >= self._most:
            self._count -= len(self._blocks.popleft()[0])

    def lines(self) -> list[tuple[int, Any]]:
        """Return the chosen lines with their numbers."""
        first = max(0, self._count - self._most)
        known = ((numbers, line, i) for numbers, line in self._blocks for i in range(len(numbers)))
        return [(numbers[i], line(i)) for numbers, line, i in itertools.islice(known, first, None)]


class SpreadLines(Choice):
    """Lines that are evenly spread, at least a given number, and the last one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._least, self._count, self._stride = count, 0, 1
        self._newest: list[tuple[int, Any]] = []

    def add(self, numbers: Sequence[int], line: Callable[[int], Any]) -> None:
        """Add lines; double the distance of the chosen ones where they are too many."""
        places = range(-self._count % self._stride, len(numbers), self._stride)
        self._chosen.extend((numbers[i], line(i)) for i in places)
        self._count += len(numbers)
        self._newest = [(numbers[-1], line(len(numbers) - 1))]
        while len(self._chosen) >= 2 * self._least:
            self._chosen = self._chosen[::2]
            self._stride *= 2

    def lines(self) -> list[tuple[int, Any]]:
        """Return the chosen lines with their numbers."""
        return [*self._chosen, *self._newest]


Choices: TypeAlias = Callable[[], dict[str, Choice]]
"""Makes the choices of lines by kind; all lines of other kinds are chosen."""


def all_lines() -> dict[str, Choice]:
    """Choose all lines."""
    return {}


def last_rounds(count: int = LAST_ROUNDS) -> dict[str, Choice]:
    """Choose the lines of the last rounds, and all lines of other kinds."""
    return {"training": LastLines(count)}


def spread_rounds(count: int = SPREAD_ROUNDS) -> dict[str, Choice]:
    """Choose lines of rounds and evaluations, evenly spread, and all lines of other kinds."""
    return {"training": SpreadLines(count), "evaluation": SpreadLines(count)}


def read_log(
    job_log_dir: str | Path,
    choices: Choices,
    *,
    after: int | None = None,
    keep: Callable[[dict[str, Any]], bool] = lambda line: True,
) -> MetricsLog:
    """Read `metrics.jsonl`."""
    folder = job_log_dir if isinstance(job_log_dir, PurePath) else Path(job_log_dir)
    path = folder / METRICS
    with explain_unreadable(path, EXPECTATION):
        if not path.exists():
            return MetricsLog([], [], [], Sum())
        sums = (s for s in read_sums(folder) if after is None or s.round <= after)
        known = max(sums, default=Sum())
        if known.bytes:
            reader = _LineReader(choices())
            if reader.read_known(path, known):
                return reader.read_rest(path, known, keep)
        return _LineReader(choices()).read_rest(path, Sum(), keep)


def last_line(job_log_dir: str | Path, after: int | None = None) -> dict[str, Any] | None:
    """Return the last line of `metrics.jsonl`, of the rounds up to one; None without a line."""
    log = read_log(
        job_log_dir,
        lambda: last_rounds(1),
        after=after,
        keep=lambda line: after is None or line["round"] <= after,
    )
    return log.lines[-1] if log.lines else None


class _LineReader:
    """The lines of a file, of which the chosen ones are remembered."""

    def __init__(self, choices: dict[str, Choice]) -> None:
        self._choices = choices
        self._codes = {_code(np.frombuffer(kind.encode(), np.uint8)): kind for kind in choices}
        self._number = 0

    def read_known(self, path: Path, known: Sum) -> bool:
        """Read the first bytes of a file; return whether they have the known checksum."""
        size, crc, rest = 0, 0, b""
        for chunk in read_chunks(path):
            new = chunk[: known.bytes - size]
            size, crc, data = size + len(new), zlib.crc32(new, crc), rest + new
            array = np.frombuffer(data, np.uint8)
            ends = np.flatnonzero(array == ord("\n"))
            starts = np.concatenate([[0], ends + 1])
            rest = data[starts[-1] :]
            self._add(data, array, starts[:-1], ends)
            if size == known.bytes or len(rest) > CHUNK_BYTES:  # no line is that long
                break
        return (size, crc, rest) == (known.bytes, known.crc, b"")

    def _add(self, data: bytes, array: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        places = np.minimum(starts + KIND_AT, len(array) - CODE_LETTERS)
        codes = _code(np.stack([array[places + i] for i in range(CODE_LETTERS)]))
        for code in np.unique(codes).tolist():
            (where,) = np.nonzero(codes == code)
            numbers = (where + self._number + 1).tolist()
            line = functools.partial(_cut, data, starts[where], ends[where])
            self._choice(self._codes.get(code, "")).add(numbers, line)
        self._number += len(starts)

    def _choice(self, kind: str) -> Choice:
        return self._choices.setdefault(kind if kind in self._choices else "", Choice())

    def read_rest(
        self, path: Path, known: Sum, keep: Callable[[dict[str, Any]], bool]
    ) -> MetricsLog:
        """Read and check the lines after the known bytes, and return all chosen lines."""
        size, crc, last_round = known
        kept, damaged = [(0, size)] if size else [], []
        for text in read_lines(path, size):
            self._number += 1
            start, size = size, size + len(text) + 1
            line = _parse(text)
            if line is None:
                damaged.append(self._number)
            elif keep(line):
                self._choice(line["kind"]).add([self._number], [line].__getitem__)
                crc, last_round = zlib.crc32(text + b"\n", crc), max(last_round, line["round"])
                if kept and kept[-1][1] == start:
                    kept[-1] = (kept[-1][0], size)
                else:
                    kept.append((start, size))
        chosen = dict(line for choice in self._choices.values() for line in choice.lines())
        lines = [
            json.loads(line) if isinstance(line, bytes) else line
            for _, line in sorted(chosen.items())
        ]
        known = Sum(sum(end - start for start, end in kept), crc, last_round)
        return MetricsLog(lines, damaged, kept, known)


def _cut(data: bytes, starts: np.ndarray, ends: np.ndarray, i: int) -> bytes:
    return data[starts[i] : ends[i]]


def _code(letters: np.ndarray) -> Any:
    """Return the first letters of a kind as one number, by which lines are told apart."""
    return sum(letters[i].astype(np.int64) << 8 * i for i in range(CODE_LETTERS))


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return a line, or None if it is damaged; only one of kind `run` has texts."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("round")) is not int:
        return None
    kind = line.get("kind")
    texts = {"kind", "item_unit"} if kind == "run" else {"kind"}
    is_whole = isinstance(kind, str) and all(
        isinstance(value, str) if name in texts else value is None or is_finite_number(value)
        for name, value in line.items()
    )
    return line if is_whole else None


def is_finite_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number that arithmetic on floats can take."""
    return isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max


def read_sums(folder: Path) -> list[Sum]:
    """Read the sums of `metrics.jsonl` that a run has recorded; none if they are damaged."""
    try:
        return [Sum(*map(int, entry)) for entry in read_json(folder / METRICS_SUMS)]
    except (OSError, ValueError, TypeError):
        return []


def write_sums(folder: Path, sums: Sequence[Sum]) -> None:
    """Record sums of `metrics.jsonl`, the newest `SUMS_REMEMBERED`."""
    content = json.dumps(list(sums)[-SUMS_REMEMBERED:])
    replace_file(folder / METRICS_SUMS, content.encode(), sync=False)
