"""Markdown tables, and tables of the metrics of runs and of runs with several seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedpax.algorithm import RESERVED_METRICS
from fedpax.console import escape_controls
from fedpax.errors import ArgumentError
from fedpax.run_files.metrics import select

DEVIATION = "\N{PLUS-MINUS SIGN}"
"""The key of an averaged line for the standard deviations of its numbers, by their names.

It differs from the names of metrics, such as "deviation".
"""


def average_lines(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Average the lines of `metrics.jsonl` of several runs."""
    if len(runs) == 1:
        return [dict(line) for line in runs[0]]
    first, *later_runs = [{(line["kind"], line["round"]): line for line in run} for run in runs]
    return [
        _average([line, *(other[key] for other in later_runs)])
        for key, line in first.items()
        if all(key in other for other in later_runs)
    ]


def _average(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    average: dict[str, Any] = {}
    deviation: dict[str, float] = {}
    for name in lines[0]:
        values = [line.get(name) for line in lines]
        if name in ("kind", "round") or not all(map(is_number_or_null, values)):
            if values.count(values[0]) == len(values):
                average[name] = values[0]  # a text, or the lines' own key
            continue
        numbers = [number_or_nan(value) for value in values]
        average[name] = statistics.fmean(numbers)
        deviation[name] = statistics.stdev(numbers) if average[name] == average[name] else math.nan
    return {**average, DEVIATION: deviation}


def is_number_or_null(value: Any) -> bool:
    """Return whether a value of a line is a number, or null, which stands for NaN."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def format_mean(line: Mapping[str, Any], name: str) -> str:
    """Format a number of a line, with its standard deviation if it has one."""
    if name not in line:
        return "-"
    mean = f"{number_or_nan(line[name]):.4f}"
    spread = line.get(DEVIATION, {}).get(name)
    return mean if spread is None else f"{mean} ± {spread:.4f}"


Lines = Sequence[Mapping[str, Any]]

# In tables of these columns, and in every line.
OTHER_COLUMNS = frozenset({*RESERVED_METRICS, DEVIATION, "virtual_seconds"})
OF_SITE = "site/"
"""Before the metrics of one site of several, `site/NAME/loss`: they are shown by name alone."""
KINDS = {"evaluation": "held-out", "training": "training"}


def metric_names(runs: Mapping[str, Lines]) -> list[str]:
    """Return the names of the metrics of runs, `loss` first."""
    numbers: dict[str, None] = {}
    for lines in runs.values():
        for kind in KINDS:
            for line in select(lines, kind)[-1:]:
                numbers |= {name: None for name, value in line.items() if is_number_or_null(value)}
    names = [name for name in numbers if name not in OTHER_COLUMNS]
    return sorted(names, key=lambda name: name != "loss")


def format_metrics(runs: Mapping[str, Lines], metrics: Sequence[str] = ()) -> str:
    """Format the last values of the metrics as a Markdown table, one run per line."""
    names = metrics or [
        name for name in metric_names(runs) if name != "loss" and not name.startswith(OF_SITE)
    ]
    last = {
        (run, kind): (select(lines, kind) or [{}])[-1]
        for run, lines in runs.items()
        for kind in KINDS
    }
    columns = [
        (kind, name)
        for name in names
        for kind in KINDS
        if any(name in last[run, kind] for run in runs)
    ]
    if not columns:
        return ""
    head = ["experiment", *(f"{KINDS[kind]} {name}" for kind, name in columns)]
    return markdown_table(
        head,
        [[run, *(format_mean(last[run, kind], name) for kind, name in columns)] for run in runs],
    )


def check_metrics(metrics: Sequence[str], runs: Mapping[str, Lines]) -> None:
    """Check that each metric is one of a run."""
    known = metric_names(runs)
    if metrics and not known:
        raise ArgumentError(
            f"--metric={metrics[0]}: no run has metrics yet, expected one of a run that has "
            "trained a round. Leave --metric out, or train first."
        )
    for name in metrics:
        if name not in known:
            raise ArgumentError(
                f"--metric={name}: no run has the metric {name!r}, expected one of "
                f"{', '.join(known)}. Set for example --metric={known[0]}."
            )


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


def number_or_nan(value: float | None) -> float:
    """Return NaN for null, which stands in `metrics.jsonl` for numbers that are not finite."""
    return math.nan if value is None else value
