"""Warnings and words on CSV whose writer meant another table than the one that is read."""

import csv
import functools
import io
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from fedpax.user_files.finding import DataFile

_FIRST_ROWS = 50
_DELIMITERS = ",;\t| "


@functools.cache  # files are read several times
def _tell(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def tell_open_quotes(file: DataFile, table: pa.Table, delimiter: str, first: int = 0) -> None:
    """Warn of values that look like the rest of a row, whole rows and the begin of another row."""
    width = table.num_columns - 1
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if not width or not pa.types.is_string(column.type) or not _has_line_break(column):
            continue
        breaks = pc.count_substring(column, "\n")
        fits = pc.equal(pc.count_substring(column, delimiter), pc.multiply(breaks, width))
        rows = pc.indices_nonzero(pc.and_(fits, pc.greater(breaks, 0))).to_pylist()
        for row in rows:
            lines = [line.split(delimiter) for line in column[row].as_py().split("\n")]
            if _are_rows(lines, table.schema.types, place):
                _tell(
                    f"{file.path}: the value of {name!r} in example {first + row}, counted from 0, "
                    f"has {len(lines)} lines with the delimiters of {len(lines)} rows: "
                    f"{column[row].as_py()[:60]!r}. If they are rows, a quote is open by mistake: "
                    'write a quote within a text as ""'
                )
                break


def _has_line_break(column: pa.ChunkedArray) -> bool:
    """Return whether a column of texts may have a line break, faster than by counting."""
    texts = [chunk.buffers()[2] for chunk in column.chunks]
    return any((np.frombuffer(x, np.uint8) == ord("\n")).any() for x in texts if x and x.size)


def _are_rows(lines: list[list[str]], types: list[pa.DataType], place: int) -> bool:
    """Return whether lines are the rest of a row after a column, whole rows, and another begin."""
    first, *between, last = lines
    lengths = [len(types) - place, *[len(types)] * len(between), place + 1]
    if [*map(len, lines)] != lengths:
        return False
    ends = [*zip(types[place + 1 :], first[1:], strict=True), *zip(types, last[:-1], strict=False)]
    if len(types) == 2:  # prose has lines with a comma, but no number without a space beside it
        kind, text = ends[0]
        return not pa.types.is_string(kind) and text.strip() == text != "" and _holds(kind, [text])
    return all(not text or pa.types.is_string(kind) or _holds(kind, [text]) for kind, text in ends)


def tell_spaces(file: DataFile, name: str) -> None:
    """Warn of a single column whose first lines all have as many words as its name."""
    with file.open() as opened:
        lines = opened.read(1 << 16).decode(errors="replace").splitlines()[: _FIRST_ROWS + 1]
    words = {len(line.split()) for line in lines}
    if len(lines) > 1 and words == {len(name.split())} and len(name.split()) > 1:
        _tell(
            f"{file.path} has one column, {name!r}, and each of its first lines has "
            f"{words.pop()} words. If spaces divide columns, set the delimiter to ' '"
        )


def find_misfit(file: DataFile, column: str, kind: pa.DataType) -> str:
    """Describe the first text in a column of CSV that a type does not hold; "" if none is found."""
    with file.open() as opened:
        text = io.TextIOWrapper(opened, "utf-8-sig", errors="replace", newline="")
        head = text.readline()
        for delimiter in _DELIMITERS:
            names = next(csv.reader([head], delimiter=delimiter), [])
            if column in names:
                rows = _numbered(csv.reader(text, delimiter=delimiter), names.index(column))
                return _first_misfit(file, rows, kind)
    return ""


def _numbered(rows: Any, place: int) -> Iterator[tuple[int, str]]:
    """Yield the line, counted from 1, and the text of each present value of a column."""
    missing = {*arrow_csv.ConvertOptions().null_values}
    for row in rows:
        if place < len(row) and row[place] not in missing:
            yield rows.line_num + 1, row[place]


def _first_misfit(file: DataFile, rows: Iterator[tuple[int, str]], kind: pa.DataType) -> str:
    while part := list(islice(rows, 1 << 12)):
        if not _holds(kind, [text for _, text in part]):
            line, text = next((line, text) for line, text in part if not _holds(kind, [text]))
            return f"line {line} of {file.path} has {text[:60]!r}"
    return ""


def _holds(kind: pa.DataType, texts: list[str]) -> bool:
    points = [text.strip().replace(",", ".") for text in texts]  # of numbers such as 1,5
    try:
        pa.array(points).cast(kind)
    except pa.ArrowException:
        return False
    return True
