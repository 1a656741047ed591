"""Pictures of runs: their held-out metrics over items, communicated bytes or time."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fedpax.pictures import save_picture
from fedpax.reports.repeats import DEVIATION
from fedpax.reports.table import number_or_nan
from fedpax.run_files.metrics import select

Line: TypeAlias = Mapping[str, Any]
"""A line of `metrics.jsonl`."""

Axis: TypeAlias = Literal["items", "bytes_across_placement", "wall_seconds", "virtual_seconds"]
"""A key of the lines that grows in the course of a run.

`virtual_seconds` is a metric of simulated asynchronous runs, on the lines of their rounds.
"""

# Okabe and Ito's palette, which readers with color vision deficiency can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def plot_losses(
    runs: Mapping[str, Sequence[Line]],
    path: str | Path,
    *,
    over: Sequence[Axis],
    metrics: Sequence[str] = ("loss",),
    training_loss: bool = False,
) -> None:
    """Plot held-out metrics of runs, one panel per horizontal axis.

    Args:
        runs: the lines of each run's `metrics.jsonl`, by the run's name.
        path: the PNG to write.
        over: the keys for the horizontal axes.
        metrics: the metrics' names, one row of panels each. Default: the loss.
        training_loss: whether to draw the metrics of every training round too, as thin lines.
    """
    rows, columns = len(metrics), len(over)
    figure = Figure(figsize=(5.5 * columns, 4.5 * rows), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, sharey="row", squeeze=False)
    for metric, row in zip(metrics, panels, strict=True):
        _plot_metric(row, runs, metric, over=over, training_loss=training_loss)
    figure.legend(
        *panels[0][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(len(runs), 4),
        frameon=False,
    )
    save_picture(figure, path)


def _plot_metric(
    panels: Sequence[Axes],
    runs: Mapping[str, Sequence[Line]],
    metric: str,
    *,
    over: Sequence[Axis],
    training_loss: bool,
) -> None:
    for key, axes in zip(over, panels, strict=True):
        scale = _style_panel(axes, key, runs.values(), metric)
        for number, (name, lines) in enumerate(runs.items()):
            at_round = {line["round"]: line.get(key) for line in select(lines, "training")}
            kinds: dict[str, dict[str, Any]] = {
                "evaluation": {"label": name, "marker": "o", "markersize": 4, "linewidth": 2}
            }
            if training_loss:
                kinds["training"] = {"linewidth": 0.8, "alpha": 0.5}
            for kind, style in kinds.items():
                chosen = select(lines, kind)
                known = [{key: at_round.get(line["round"]), **line} for line in chosen]
                positions = [x / scale for x in _numbers(known, key)]
                color = COLORS[number % len(COLORS)]
                values = _numbers(chosen, metric)
                if kind == "evaluation" and any(DEVIATION in line for line in chosen):
                    style["yerr"] = [line[DEVIATION].get(metric, 0.0) for line in chosen]
                    style |= {"capsize": 3, "elinewidth": 1}
                _plot(axes, positions, values, color=color, **style)
    thin = f" (thin: training {metric})" if training_loss else ""
    panels[0].set_ylabel(f"held-out {metric}{thin}")


def _plot(axes: Axes, positions: Sequence[float], losses: Sequence[float], **style: Any) -> None:
    # A logarithmic axis has no zero.
    if axes.get_xscale() == "linear" or not positions or max(positions) > 0:
        (axes.errorbar if "yerr" in style else axes.plot)(positions, losses, **style)
    elif max(positions) == 0 and "label" in style:
        axes.axhline(losses[-1], color=style["color"], linewidth=2, linestyle="--")
        axes.annotate(
            "no communication",
            (0.01, losses[-1]),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color=style["color"],
        )


def _numbers(lines: Sequence[Line], key: str) -> list[float]:
    return [number_or_nan(line.get(key)) for line in lines]


def _time_unit(runs: Iterable[Sequence[Line]], key: Axis) -> tuple[str, float]:
    """Return the unit that suits the longest run, and the seconds in it."""
    longest = max((line.get(key) or 0 for lines in runs for line in lines), default=0)
    if longest < 300:
        return "s", 1
    return ("min", 60) if longest < 3 * 3600 else ("h", 3600)


def _style_panel(axes: Axes, key: Axis, runs: Iterable[Sequence[Line]], metric: str) -> float:
    """Style a panel's axes for all runs; return the size of its horizontal unit."""
    scale, shown = 1.0, metric[:1].upper() + metric[1:]
    match key:
        case "items":
            units = {
                line.get("item_unit", "items") for lines in runs for line in select(lines, "run")
            }
            label = " or ".join(sorted(units)) or "items"
            title = f"{shown} over {label}"
            axes.xaxis.set_major_formatter(EngFormatter())
        case "bytes_across_placement":
            title, label = f"{shown} over communication", "bytes between participants"
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        case "wall_seconds" | "virtual_seconds":
            unit, scale = _time_unit(runs, key)
            kind = key.removesuffix("_seconds")
            title, label = f"{shown} over {kind} time", f"{kind} time ({unit})"
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(label)
    axes.grid(alpha=0.25, which="both", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return scale
