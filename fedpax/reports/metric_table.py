"""A table of the metrics of runs, from the loss function and from the evaluation, by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedpax.algorithm import RESERVED_METRICS
from fedpax.errors import ArgumentError
from fedpax.reports.repeats import DEVIATION, format_mean, is_number
from fedpax.reports.table import markdown_table
from fedpax.run_files.metrics import select

Lines = Sequence[Mapping[str, Any]]

# In tables of their own columns, and in every line.
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
                numbers |= {name: None for name, value in line.items() if is_number(value)}
    names = [name for name in numbers if name not in OTHER_COLUMNS]
    return sorted(names, key=lambda name: name != "loss")


def format_metrics(runs: Mapping[str, Lines], metrics: Sequence[str] = ()) -> str:
    """Format the last values of the metrics as a Markdown table, one run per line.

    Example:
        >>> lines = [{"kind": "evaluation", "round": 4, "loss": 0.5, "accuracy": 0.875}]
        >>> print(format_metrics({"fedavg": lines}))
        | experiment | held-out accuracy |
        |------------|-------------------|
        | fedavg     |            0.8750 |
    """
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
