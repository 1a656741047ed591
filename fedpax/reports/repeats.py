"""Runs of one experiment with several seeds, as one run with means and standard deviations."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedpax.reports.table import number_or_nan

DEVIATION = "\N{PLUS-MINUS SIGN}"
"""The key of an averaged line for the standard deviations of its numbers, by their names.

It differs from the names of metrics, such as "deviation".
"""


def average_lines(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Average the lines of `metrics.jsonl` of several runs.

    Example:
        >>> def run(loss):
        ...     return [{"kind": "evaluation", "round": 1, "loss": loss}]
        >>> average_lines([run(1.0), run(2.0), run(3.0)])
        [{'kind': 'evaluation', 'round': 1, 'loss': 2.0, '±': {'loss': 1.0}}]
    """
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
        if name in ("kind", "round") or not all(map(is_number, values)):
            if values.count(values[0]) == len(values):
                average[name] = values[0]  # a text, or the lines' own key
            continue
        numbers = [number_or_nan(value) for value in values]
        average[name] = statistics.fmean(numbers)
        deviation[name] = statistics.stdev(numbers) if average[name] == average[name] else math.nan
    return {**average, DEVIATION: deviation}


def is_number(value: Any) -> bool:
    """Return whether a value of a line is a number, or null, which stands for NaN."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def format_mean(line: Mapping[str, Any], name: str) -> str:
    """Format a number of a line, with its standard deviation if it has one.

    Example:
        >>> line = {"loss": 2.0, DEVIATION: {"loss": 0.5}}
        >>> format_mean(line, "loss"), format_mean({"loss": 2.0}, "loss"), format_mean({}, "loss")
        ('2.0000 ± 0.5000', '2.0000', '-')
    """
    if name not in line:
        return "-"
    mean = f"{number_or_nan(line[name]):.4f}"
    spread = line.get(DEVIATION, {}).get(name)
    return mean if spread is None else f"{mean} ± {spread:.4f}"
