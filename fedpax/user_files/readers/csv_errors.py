"""Errors for CSV that cannot be parsed: its encoding, its delimiter, and rows of other lengths."""

import contextlib
import io
import re
from collections.abc import Iterator

import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.user_files.contents import describe_contents
from fedpax.user_files.finding import DataFile

_FIRST_ROWS = 50  # below which a longer row can have the names of the columns
_ROW = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)


@contextlib.contextmanager
def rows_explained(file: DataFile, delimiter: str) -> Iterator[None]:
    """Add the remedy to pyarrow's error for a row, whose number one thread tells."""
    try:
        yield
    except pa.ArrowInvalid as error:
        if "straddl" in str(error) or "out of sync" in str(error):
            raise ArgumentError(
                "it has a quoted value that does not end within 16 MB. Close the quote, or write a "
                'quote within a text as ""'
            ) from error
        match = _ROW.search(str(error))
        if match is None:
            raise
        raise ArgumentError(_explain_row(file, delimiter, match)) from error


def _explain_row(file: DataFile, delimiter: str, match: re.Match[str]) -> str:
    row, expected, got = int(match[1]), int(match[2]), int(match[3])
    first_line = match[4].split("\n")[0].rstrip("\r")
    text = f"its row {row} has {got} columns, expected {expected} as in its first line: "
    if '"' in first_line and "\n" in match[4].strip():
        return (
            f"{text}{first_line!r} opens a quote that its line does not close. Close it, or write "
            'a quote within a text as ""'
        )
    if got > expected and row <= _FIRST_ROWS:
        lines = _first_lines(file)
        place = next((k for k, line in enumerate(lines) if line.startswith(first_line[:40])), 0)
        # The rows below a line of names have its length; those below a damaged row have not.
        below = lines[place + 1] if place + 1 < len(lines) else first_line
        if place and below.count(delimiter) == first_line.count(delimiter):
            return (
                f"its line 1, {lines[0][:80]!r}, is read as the names of the columns, "
                f"{expected} in all, and its line {place + 1}, {first_line[:80]!r}, has {got} "
                "columns. If line 1 is a title or a comment, remove the lines above the names, "
                f"such as by `tail -n +{place + 1} {file.path} > new.csv`; else correct the row"
            )
    return (
        f"{text}{first_line[:80]!r}. Correct it, and quote a value that contains the delimiter; "
        "`fedpax prepare` leaves such rows out with --on_bad_row=skip"
    )


def _first_lines(file: DataFile) -> list[str]:
    with file.open() as opened:
        head: bytes = opened.read(1 << 16)
    return head.decode(errors="replace").removeprefix("\ufeff").splitlines()


def check_header(file: DataFile, delimiter: str) -> None:
    """Raise an error for a file in another encoding, or with another delimiter, than the usual."""
    with file.open() as opened:
        header = opened.read(1 << 16).split(b"\n")[0]
    if header.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ArgumentError(
            f"it is UTF-16, not UTF-8, expected UTF-8. Convert it, {_convert('UTF-16', file)}"
        )
    if delimiter.encode() not in header:
        check_delimiter(delimiter, header.decode(errors="replace").strip())


def check_single_column(file: DataFile, delimiter: str, name: str) -> None:
    """Raise an error for one column that the delimiter should divide, or that is no table."""
    check_delimiter(delimiter, name)
    if told := describe_contents(file):
        raise ArgumentError(told)


def check_delimiter(delimiter: str, name: str) -> None:
    """Raise an error for the name of a single column that has another delimiter."""
    if delimiters := [c for c in ";\t|" if c in name]:
        raise ArgumentError(
            f"it has one column, {name!r}, which delimiter={delimiter!r} does not divide. Set "
            f"delimiter={delimiters[0]!r}"
        )


def not_utf8(file: DataFile) -> ArgumentError:
    """Return an error that names the first line that is not UTF-8."""
    where = ""
    with file.open() as opened:
        for number, line in enumerate(io.BufferedReader(opened), 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.start + 20]
                text = around.decode("cp1252", errors="replace").strip()
                where = f" in line {number}, which as WINDOWS-1252 is {text!r}"
                break
    return ArgumentError(
        f"it is not UTF-8{where}, expected UTF-8. Correct the line, or convert a file of "
        f"another encoding, {_convert('WINDOWS-1252', file)}"
    )


def _convert(encoding: str, file: DataFile) -> str:
    new = f"new{file.suffix}"
    return f"such as by `iconv -f {encoding} -t UTF-8 {file.path} > {new}`"
