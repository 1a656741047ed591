"""Tables of the metrics of runs, and of runs with several seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedpax.console import markdown_table
from fedpax.errors import ArgumentError
from fedpax.run_files.metrics import OF_SITE, RESERVED_METRICS, select

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


def number_or_nan(value: float | None) -> float:
    """Return NaN for null, which stands in `metrics.jsonl` for numbers that are not finite."""
    return math.nan if value is None else value
