"""Several runs side by side: a table, a picture and a JSON file from what they recorded."""

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

# Okabe and Ito's colours, which people who see colours differently can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class Measured(NamedTuple):
    """What one run came to.

    Attributes:
        name: the experiment.
        loss: held-out loss after the last round.
        bytes_across_placement: bytes sent between participants in all rounds together; NaN if
            they could not be read from the compiled round.
        tokens: how many tokens it was trained on.
        tokens_per_second: over all rounds, without compilation, evaluation and saving.
        parameters: how many numbers the model has.
        wall_seconds: everything, of all processes that trained it.
    """

    name: str
    loss: float
    bytes_across_placement: float
    tokens: int
    tokens_per_second: float
    parameters: int
    wall_seconds: float


def measure(name: str, job_log_dir: str | Path) -> Measured:
    """Sums up a run from the lines that it wrote.

    Args:
        name: what to call it.
        job_log_dir: its folder.

    Returns:
        The sums.

    Raises:
        ValueError: if the run has not been evaluated yet.
    """
    lines = read_metrics(job_log_dir)
    rounds, evaluations = select(lines, "training"), select(lines, "evaluation")
    if not evaluations:
        raise ValueError(f"{job_log_dir} holds no evaluation yet: train {name} there first.")
    return Measured(
        name=name,
        loss=_number(evaluations[-1]["loss"]),
        bytes_across_placement=_number(rounds[-1]["bytes_across_placement"]),
        tokens=rounds[-1]["tokens"],
        tokens_per_second=rounds[-1]["tokens"] / sum(line["seconds"] for line in rounds),
        parameters=select(lines, "run")[0]["parameters"],
        wall_seconds=lines[-1]["wall_seconds"],
    )


def table(measured: Sequence[Measured]) -> str:
    """Lays runs out as a table, one a line, that also reads as Markdown.

    Args:
        measured: the runs.

    Returns:
        The table's text.

    Example:
        >>> print(table([Measured("diloco", 2.5, 3.2e6, 10**6, 9e3, 2 * 10**6, 130.0)]))
        | experiment | held-out loss | bytes between | tokens/s | parameters | wall time |
        |------------|---------------|---------------|----------|------------|-----------|
        | diloco     |        2.5000 |        3.2 MB |    9,000 |  2,000,000 |     130 s |
    """
    head = (
        "experiment", "held-out loss", "bytes between", "tokens/s", "parameters", "wall time",
    )  # fmt: skip
    rows = [
        (
            run.name,
            f"{run.loss:.4f}",
            _bytes(run.bytes_across_placement),
            f"{run.tokens_per_second:,.0f}",
            f"{run.parameters:,}",
            f"{run.wall_seconds:.0f} s",
        )
        for run in measured
    ]
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str], first_left: bool = False) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    heading = " | ".join(cell.ljust(width) for cell, width in zip(head, widths, strict=True))
    return "\n".join([f"| {heading} |", rule, *(line(row) for row in rows)])


def picture(folders: Mapping[str, str | Path], path: str | Path) -> None:
    """Draws held-out loss over tokens and over bytes between participants.

    Args:
        folders: the runs' folders by name.
        path: the PNG to write.
    """
    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    over_tokens, over_bytes = figure.subplots(1, 2, sharey=True)
    for number, (name, folder) in enumerate(folders.items()):
        lines = select(read_metrics(folder), "evaluation")
        losses = [_number(line["loss"]) for line in lines]
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "linewidth": 2,
            "marker": "o",
            "markersize": 4,
        }
        over_tokens.plot([line["tokens"] for line in lines], losses, label=name, **style)
        crossed = [_number(line["bytes_across_placement"]) for line in lines]
        if max(crossed) > 0:
            over_bytes.plot(crossed, losses, label=name, **style)
        elif max(crossed) == 0:  # a logarithmic axis has no zero
            style.update(marker="", linestyle="--")
            over_bytes.axhline(losses[-1], **style)
            over_bytes.annotate(
                "sends nothing",
                (0.01, losses[-1]),
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
                color=style["color"],
            )
    over_bytes.set_xscale("log")
    _dress(over_tokens, "Loss over tokens", "tokens", "")
    _dress(over_bytes, "Loss over communication", "bytes between participants", "B")
    over_tokens.set_ylabel("held-out loss")
    figure.legend(
        *over_tokens.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(folders),
        frameon=False,
    )
    figure.savefig(path)


def write_comparison(folders: Mapping[str, str | Path], destination: str | Path) -> str:
    """Writes ``comparison.png`` and ``comparison.json``.

    Args:
        folders: the runs' folders by name.
        destination: the folder that gets the files.

    Returns:
        The table.
    """
    measured = [measure(name, folder) for name, folder in folders.items()]
    picture(folders, Path(destination) / "comparison.png")
    content = [
        {key: None if value != value else value for key, value in run._asdict().items()}
        for run in measured
    ]
    write_atomically(Path(destination) / "comparison.json", json.dumps(content, indent=2) + "\n")
    return table(measured)


def _dress(axes: Axes, title: str, label: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(EngFormatter(unit=unit))
    axes.grid(alpha=0.25, which="both", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _number(value: float | None) -> float:
    """Metrics that are not finite are null in the file."""
    return math.nan if value is None else value


def _bytes(count: float) -> str:
    if not math.isfinite(count):
        return "unknown"
    return EngFormatter(unit="B", places=1)(count) if count else "0 B"
