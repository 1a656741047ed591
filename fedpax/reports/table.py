"""Markdown tables, and the numbers in their cells."""

import math
from collections.abc import Sequence

from fedpax.console import escape_controls


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table: the first column aligned left, all others right.

    Example:
        >>> print(markdown_table(["run", "loss"], [["diloco", "2.5"], ["single", "12.5"]]))
        | run    | loss |
        |--------|------|
        | diloco |  2.5 |
        | single | 12.5 |
    """
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
    """Format a metric: four decimals, and from a million on four digits.

    Example:
        >>> format_value(0.25), format_value(2.5e30)
        ('0.2500', '2.5e+30')
    """
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
    """Format a time: in seconds, or from an hour on in hours and minutes.

    Example:
        >>> format_seconds(130.2), format_seconds(7500)
        ('130 s', '2 h 05 min')
    """
    if seconds < 3600:
        return f"{seconds:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def number_or_nan(value: float | None) -> float:
    """Return NaN for null, which stands in `metrics.jsonl` for numbers that are not finite."""
    return math.nan if value is None else value
