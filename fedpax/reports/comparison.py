"""Comparison of several runs: a table, a picture and a JSON file from their logged metrics."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fedpax.console import format_bytes, format_seconds, format_value, markdown_table
from fedpax.errors import ArgumentError
from fedpax.extras import is_installed
from fedpax.reports.metric_table import (
    DEVIATION,
    Lines,
    average_lines,
    check_metrics,
    format_metrics,
    metric_names,
    number_or_nan,
)
from fedpax.run_files.metrics import read_metrics, select, throughput
from fedpax.run_files.paths import write_atomically

Folders: TypeAlias = str | Path | Sequence[str | Path]
"""The folder of a run, or the folders of runs of one experiment with several seeds."""


class RunSummary(NamedTuple):
    """The results of one run."""

    name: str
    loss: float  # held-out, after the last round
    # bytes that participants exchanged in all rounds together; NaN if the number is unknown
    bytes_across_placement: float
    items: int  # tokens or examples that the model was trained on
    # without compilation, evaluation and saving
    items_per_second: float
    item_unit: str  # of `items`: `"tokens"` or `"examples"`
    num_parameters: float  # numbers in the model; NaN if the line of the run's sizes is lost
    wall_seconds: float  # of all processes that trained the run
    # simulated seconds of an asynchronous run; NaN for any other run
    virtual_seconds: float = math.nan
    loss_deviation: float = math.nan  # over seeds; NaN for one run

    @property
    def has_deviation(self) -> bool:
        """Return whether the loss is a mean over seeds."""
        return not math.isnan(self.loss_deviation)


def summarize_run(name: str, lines: Lines, job_log_dir: str | Path) -> RunSummary:
    """Summarize a run from the metrics that it logged."""
    runs, rounds, evaluations = (select(lines, kind) for kind in ("run", "training", "evaluation"))
    if not (rounds and evaluations):
        raise ArgumentError(
            f"{job_log_dir} has no evaluation of {name}, expected at least one. Train it there "
            f"first: fedpax train --exp={name} --job_log_dir={job_log_dir}"
        )
    sizes = runs[0] if runs else {}
    return RunSummary(
        name=name,
        loss=number_or_nan(evaluations[-1]["loss"]),
        bytes_across_placement=number_or_nan(rounds[-1]["bytes_across_placement"]),
        items=rounds[-1]["items"],
        items_per_second=throughput(rounds),
        item_unit=sizes.get("item_unit", "items"),
        num_parameters=number_or_nan(sizes.get("num_parameters")),
        wall_seconds=lines[-1]["wall_seconds"],
        virtual_seconds=number_or_nan(rounds[-1].get("virtual_seconds")),
        loss_deviation=evaluations[-1].get(DEVIATION, {}).get("loss", math.nan),
    )


def format_table(runs: Sequence[RunSummary]) -> str:
    """Format runs as a Markdown table, one run per line."""
    units = {run.item_unit for run in runs}
    throughput = f"{units.pop()}/s" if len(units) == 1 else "throughput"
    head: tuple[str, ...] = (
        "experiment", "held-out loss", "communicated", throughput, "parameters", "wall time",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            run.name,
            format_value(run.loss)
            + (f" ± {format_value(run.loss_deviation)}" if run.has_deviation else ""),
            format_bytes(run.bytes_across_placement),
            f"{run.items_per_second:,.0f}" + (f" {run.item_unit}/s" if units else ""),
            "-" if math.isnan(run.num_parameters) else f"{run.num_parameters:,.0f}",
            format_seconds(run.wall_seconds),
        )
        for run in runs
    ]
    if any(run.virtual_seconds == run.virtual_seconds for run in runs):
        head = (*head, "virtual time")
        rows = [
            (*row, "-" if math.isnan(seconds) else format_seconds(seconds))
            for row, seconds in zip(rows, (run.virtual_seconds for run in runs), strict=True)
        ]
    return markdown_table(head, rows)


def write_comparison(
    folders: Mapping[str, Folders], destination: str | Path, metrics: Sequence[str] = ()
) -> str:
    """Write `comparison.png` and `comparison.json`, and return the tables."""
    each = {
        name: [paths] if isinstance(paths, str | Path) else paths for name, paths in folders.items()
    }
    lines = {
        name: average_lines([read_metrics(path) for path in paths]) for name, paths in each.items()
    }
    runs = [summarize_run(name, lines[name], paths[0]) for name, paths in each.items()]
    check_metrics(metrics, lines)
    if is_installed("matplotlib"):
        from fedpax.reports.plot import Axis, plot_losses

        # A panel of which no run has a value, such as bytes on one device, is left out.
        over: tuple[Axis, ...] = ("items", "bytes_across_placement", "virtual_seconds")
        picture = Path(destination) / "comparison.png"
        plot_losses(lines, picture, over=over, metrics=metrics or ("loss",))
    content = [
        {key: None if value != value else value for key, value in run._asdict().items()}
        | {"metrics": _last_metrics(lines[run.name])}
        for run in runs
    ]
    write_atomically(Path(destination) / "comparison.json", json.dumps(content, indent=2) + "\n")
    second = format_metrics(lines, metrics)
    return format_table(runs) + (f"\n\nMetrics:\n{second}" if second else "")


def _last_metrics(lines: Lines) -> dict[str, Any]:
    """Return the last held-out and training metrics, with standard deviations over seeds."""
    content: dict[str, Any] = {}
    for kind in ("evaluation", "training"):
        line = select(lines, kind)[-1]
        names = metric_names({"": [line]})
        content[kind] = {name: line[name] for name in names}
        if DEVIATION in line:
            content[f"{kind}_deviation"] = {name: line[DEVIATION].get(name) for name in names}
    return content
