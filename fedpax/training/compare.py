"""Comparison of several runs: a table, a picture and a JSON file from their logged metrics."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fedpax.training.configuration import write_atomically
from fedpax.training.metrics import read_metrics, select

# Okabe and Ito's palette, which readers with color vision deficiency can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class RunSummary(NamedTuple):
    """The results of one run.

    Attributes:
        name: the experiment.
        loss: held-out loss after the last round.
        bytes_across_placement: bytes that participants exchanged in all rounds together; NaN if
            the number is unknown.
        items: tokens or examples that the model was trained on.
        items_per_second: throughput over all rounds, without compilation, evaluation and saving.
        item_unit: the unit of `items`: `"tokens"` or `"examples"`.
        num_parameters: numbers in the model.
        wall_seconds: total time of all processes that trained the run.
    """

    name: str
    loss: float
    bytes_across_placement: float
    items: int
    items_per_second: float
    item_unit: str
    num_parameters: int
    wall_seconds: float


def summarize_run(name: str, job_log_dir: str | Path) -> RunSummary:
    """Summarize a run from the metrics that it logged.

    Args:
        name: the run's name in the table.
        job_log_dir: the run's folder.

    Returns:
        The summary.

    Raises:
        ValueError: the run has no evaluation yet.
    """
    lines = read_metrics(job_log_dir)
    runs, rounds, evaluations = (select(lines, kind) for kind in ("run", "training", "evaluation"))
    if not (runs and rounds and evaluations):
        raise ValueError(
            f"{job_log_dir} has no evaluation of {name}, expected at least one. Train it there "
            f"first: fedpax train --exp={name} --job_log_dir={job_log_dir}"
        )
    return RunSummary(
        name=name,
        loss=_number(evaluations[-1]["loss"]),
        bytes_across_placement=_number(rounds[-1]["bytes_across_placement"]),
        items=rounds[-1]["items"],
        items_per_second=rounds[-1]["items"] / sum(line["seconds"] for line in rounds),
        item_unit=runs[0]["item_unit"],
        num_parameters=runs[0]["num_parameters"],
        wall_seconds=lines[-1]["wall_seconds"],
    )


def format_table(runs: Sequence[RunSummary]) -> str:
    """Format runs as a Markdown table, one run per line.

    Args:
        runs: the summaries. If they count different items, the unit stands in every cell.

    Returns:
        The table.

    Example:
        >>> run = RunSummary("diloco", 2.5, 3.2e6, 10**6, 9e3, "tokens", 2 * 10**6, 130.0)
        >>> print(format_table([run]))
        | experiment | held-out loss | communicated | tokens/s | parameters | wall time |
        |------------|---------------|--------------|----------|------------|-----------|
        | diloco     |        2.5000 |       3.2 MB |    9,000 |  2,000,000 |     130 s |
    """
    units = {run.item_unit for run in runs}
    throughput = f"{units.pop()}/s" if len(units) == 1 else "throughput"
    head = (
        "experiment", "held-out loss", "communicated", throughput, "parameters", "wall time",
    )  # fmt: skip
    rows = [
        (
            run.name,
            f"{run.loss:.4f}",
            _bytes(run.bytes_across_placement),
            f"{run.items_per_second:,.0f}" + (f" {run.item_unit}/s" if units else ""),
            f"{run.num_parameters:,}",
            f"{run.wall_seconds:.0f} s",
        )
        for run in runs
    ]
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    heading = " | ".join(cell.ljust(width) for cell, width in zip(head, widths, strict=True))
    return "\n".join([f"| {heading} |", rule, *(line(row) for row in rows)])


def plot_comparison(folders: Mapping[str, str | Path], path: str | Path) -> None:
    """Plot the held-out loss over items and over bytes that participants exchanged.

    Args:
        folders: the runs' folders by name.
        path: the PNG to write.
    """
    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    over_items, over_bytes = figure.subplots(1, 2, sharey=True)
    units = set()
    for number, (name, folder) in enumerate(folders.items()):
        lines = read_metrics(folder)
        units |= {line["item_unit"] for line in select(lines, "run")}
        evaluations = select(lines, "evaluation")
        losses = [_number(line["loss"]) for line in evaluations]
        style = {
            "color": COLORS[number % len(COLORS)],
            "linewidth": 2,
            "marker": "o",
            "markersize": 4,
        }
        over_items.plot([line["items"] for line in evaluations], losses, label=name, **style)
        exchanged = [_number(line["bytes_across_placement"]) for line in evaluations]
        if max(exchanged) > 0:
            over_bytes.plot(exchanged, losses, label=name, **style)
        elif max(exchanged) == 0:  # a logarithmic axis has no zero
            style.update(marker="", linestyle="--")
            over_bytes.axhline(losses[-1], **style)
            over_bytes.annotate(
                "no communication",
                (0.01, losses[-1]),
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
                color=style["color"],
            )
    unit = " or ".join(sorted(units))
    over_bytes.set_xscale("log")
    _style_axes(over_items, f"Loss over {unit}", unit, "")
    _style_axes(over_bytes, "Loss over communication", "bytes between participants", "B")
    over_items.set_ylabel("held-out loss")
    figure.legend(
        *over_items.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(folders),
        frameon=False,
    )
    figure.savefig(path)


def write_comparison(folders: Mapping[str, str | Path], destination: str | Path) -> str:
    """Write `comparison.png` and `comparison.json`.

    Args:
        folders: the runs' folders by name.
        destination: the folder for the two files.

    Returns:
        The table.
    """
    runs = [summarize_run(name, folder) for name, folder in folders.items()]
    plot_comparison(folders, Path(destination) / "comparison.png")
    content = [
        {key: None if value != value else value for key, value in run._asdict().items()}
        for run in runs
    ]
    write_atomically(Path(destination) / "comparison.json", json.dumps(content, indent=2) + "\n")
    return format_table(runs)


def _style_axes(axes: Axes, title: str, label: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(EngFormatter(unit=unit))
    axes.grid(alpha=0.25, which="both", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _number(value: float | None) -> float:
    """Return NaN for null, which stands in the file for numbers that are not finite."""
    return math.nan if value is None else value


def _bytes(count: float) -> str:
    if not math.isfinite(count):
        return "unknown"
    return EngFormatter(unit="B", places=1)(count) if count else "0 B"
