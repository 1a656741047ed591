"""Lines and tables for the user.

A closed pipe or a full disk loses the line, but does not stop the run.
"""

import functools
import io
import logging
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_DIRECTIONS = (0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LONGEST_RECORD = 2000
_UNDECODED = range(0xD800, 0xE000)  # bytes of file names that are no text
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS} | {
    code: f"\\u{code:04x}" for code in (*_DIRECTIONS, *_UNDECODED)
}


def count_of(number: float, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def first_ten(texts: Iterable[str]) -> str:
    """Join texts by commas; beyond ten, tell how many more there are."""
    shown = list(texts)
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")


def open_closed_streams() -> None:
    """Open the null device for each closed standard stream, so that no file gets its descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))


def escape_unknown_characters() -> None:
    """Print characters that the encoding of stdout or stderr lacks as escapes."""
    # In the C locale the encoding can be ASCII: a user's path could not be printed.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def escape_logs() -> None:
    """Escape control characters in what Orbax logs: it quotes files of a folder that it reads."""
    logging.getLogger("absl").addFilter(_escape_record)


def _escape_record(record: logging.LogRecord) -> bool:
    text = escape_controls(record.getMessage(), keep="\n\t")
    cut = "" if len(text) <= _LONGEST_RECORD else " ..."
    record.msg, record.args = text[:_LONGEST_RECORD] + cut, None
    return True


def hide_late_writes() -> None:
    """Hide the errors of Orbax's writes that end after a failed save; for a program alone."""
    # TensorStore ends these writes after Orbax has closed the save's event loop. Python reports the
    # errors to this hook alone, which the library leaves as it is.
    former = sys.unraisablehook

    def report(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
            former(unraisable)

    sys.unraisablehook = report


def print_line(text: str) -> None:
    """Print a line on stdout with its control characters escaped; drop it if stdout is closed."""
    _write(text, sys.stdout)


def print_error(text: str) -> None:
    """Print a line on stderr with its control characters escaped; drop it if stderr is closed."""
    _write(text, sys.stderr)


def escape_controls(text: str, keep: str = "") -> str:
    """Escape the control characters of a text, which a terminal would execute."""
    return text.translate(_escapes(keep))


@functools.cache  # a page of help or a table has thousands of texts
def _escapes(keep: str) -> dict[int, str]:
    return {code: new for code, new in _ESCAPES.items() if chr(code) not in keep}


def _write(text: str, stream: TextIO) -> None:
    text = escape_controls(text, keep="\n\t")
    try:
        print(text, file=stream, flush=True)
    except OSError:
        discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """Discard all further output of a stream."""
    # The reader of a pipe can exit early, as `head` does: later writes, and Python's flush at exit,
    # would raise again.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


# ---- Markdown tables, and the numbers in their cells


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table: the first column aligned left, all others right."""
    # Names come from files, which can come from others.
    head = [escape_controls(cell) for cell in head]
    rows = [[escape_controls(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    heading = " | ".join(cell.ljust(width) for cell, width in zip(head, widths, strict=True))
    return "\n".join([f"| {heading} |", rule, *(line(row) for row in rows)])


def format_value(value: float) -> str:
    """Format a metric: four decimals, and from a million on four digits."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def format_bytes(count: float) -> str:
    """Format a number of bytes, or `unknown` if it is not finite."""
    if not math.isfinite(count):
        return "unknown"
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while round(abs(count), 1) >= 1000 and power < len(prefixes) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.1f} {prefixes[power]}B" if count else "0 B"


def format_seconds(seconds: float) -> str:
    """Format a time: in seconds, or from an hour on in hours and minutes."""
    if seconds < 3600:
        return f"{seconds:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
