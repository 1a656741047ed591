"""Pictures of runs: their held-out metrics over items, communicated bytes or time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedpax.pictures import (
    Picture,
    add_legend,
    byte_axis,
    count_ticks,
    line_style,
    note_no_values,
    plain_text,
    save_picture,
    short_text,
    style_panel,
)
from fedpax.reports.metric_table import DEVIATION, number_or_nan
from fedpax.run_files.metrics import select

Line: TypeAlias = Mapping[str, Any]
"""A line of `metrics.jsonl`."""

MOST_MARKERS = 200
"""Number of points beyond which they would hide their line."""

Axis: TypeAlias = Literal["items", "bytes_across_placement", "wall_seconds", "virtual_seconds"]
"""A key of the lines that grows in the course of a run.

`virtual_seconds` is a metric of simulated asynchronous runs, on the lines of their rounds.
"""


def plot_losses(
    runs: Mapping[str, Sequence[Line]],
    path: str | Path,
    *,
    over: Sequence[Axis],
    metrics: Sequence[str] = ("loss",),
    training_loss: bool = False,
) -> None:
    """Plot held-out metrics of runs, one panel per horizontal axis."""
    # A key that no run has, or that stays zero in all runs, such as the bytes between participants
    # on one device, has no panel.
    save_picture(draw_losses(runs, over=over, metrics=metrics, training_loss=training_loss), path)


def draw_losses(
    runs: Mapping[str, Sequence[Line]],
    *,
    over: Sequence[Axis],
    metrics: Sequence[str],
    training_loss: bool,
) -> Figure:
    """Draw the picture of `plot_losses`."""
    over = [key for key in over if _grows(runs.values(), key)] or over[:1]
    rows, columns = len(metrics), len(over)
    figure = Picture(figsize=(5.5 * columns, 4.5 * rows), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, sharey="row", squeeze=False)
    for metric, row in zip(metrics, panels, strict=True):
        _plot_metric(row, runs, metric, over=over, training_loss=training_loss)
    handles = [Line2D([], [], linewidth=2, **line_style(i)) for i in range(len(runs))]
    add_legend(figure, handles, list(runs))
    return figure


def _grows(runs: Iterable[Sequence[Line]], key: Axis) -> bool:
    return any(_numbers_above_zero([line.get(key) for lines in runs for line in lines]))


def _plot_metric(
    panels: Sequence[Axes],
    runs: Mapping[str, Sequence[Line]],
    metric: str,
    *,
    over: Sequence[Axis],
    training_loss: bool,
) -> None:
    kinds = ("evaluation", "training") if training_loss else ("evaluation",)
    for key, axes in zip(over, panels, strict=True):
        scale = _style_panel(axes, key, runs.values(), metric)
        drawn = 0
        for number, lines in enumerate(runs.values()):
            for kind in kinds:
                chosen = select(lines, kind)
                positions = [x / scale for x in _positions(lines, chosen, key)]
                values = _numbers(chosen, metric)
                style = line_style(number) | _kind_style(kind, chosen, metric)
                drawn += _plot(axes, key, positions, values, style)
        if not drawn:
            note_no_values(axes, metric)
    thin = f"\n(thin: training {short_text(metric)})" if training_loss else ""
    panels[0].set_ylabel(f"held-out {short_text(metric)}{thin}")


def _positions(lines: Sequence[Line], chosen: Sequence[Line], key: Axis) -> list[float]:
    """Return the values of a key, for a line that lacks it from the lines of the nearest rounds."""
    if all(key in line for line in chosen):
        return _numbers(chosen, key)
    rounds = [line for line in select(lines, "training") if line.get(key) is not None]
    if not rounds:
        return [math.nan] * len(chosen)
    between = np.interp(
        [line["round"] for line in chosen],
        [line["round"] for line in rounds],
        [line[key] for line in rounds],
        left=math.nan,
        right=math.nan,
    )
    return [number_or_nan(line.get(key, x)) for line, x in zip(chosen, between, strict=True)]


def _kind_style(kind: str, lines: Sequence[Line], metric: str) -> dict[str, Any]:
    """Return the style of held-out or training metrics, with error bars for means."""
    if kind == "training":  # a single point has no line
        return {"linewidth": 0.8, "alpha": 0.5, "marker": "." if len(lines) == 1 else None}
    style: dict[str, Any] = {"linewidth": 2}
    if len(lines) <= MOST_MARKERS:
        style |= {"marker": "o", "markersize": 4}
    if any(DEVIATION in line for line in lines):
        style["yerr"] = [line.get(DEVIATION, {}).get(metric, 0.0) for line in lines]
        style |= {"capsize": 3, "elinewidth": 1}
    return style


def _plot(
    axes: Axes,
    key: Axis,
    positions: Sequence[float],
    values: Sequence[float],
    style: dict[str, Any],
) -> bool:
    """Draw a line; return whether a point of it is visible."""
    visible = [
        (x, y)
        for x, y in zip(positions, values, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    if not visible:
        return False
    if key == "bytes_across_placement" and max(x for x, _ in visible) == 0:
        if "alpha" not in style:
            color, dashes = style["color"], style["linestyle"]
            axes.axhline(visible[-1][1], linewidth=2, color=color, linestyle=dashes)
            axes.set_xlabel(
                "bytes of collectives between participants (horizontal: no communication)"
            )
    else:
        (axes.errorbar if "yerr" in style else axes.plot)(positions, values, **style)
    return True


def _numbers_above_zero(values: Iterable[float | None]) -> list[float]:
    return [x for x in values if x is not None and math.isfinite(x) and x > 0]


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
    scale, shown = 1.0, short_text(metric[:1].upper() + metric[1:])
    style_panel(axes)
    match key:
        case "items":
            units = {
                line.get("item_unit", "items") for lines in runs for line in select(lines, "run")
            }
            label = " or ".join(sorted(units)) or "items"
            title = f"{shown} over {label}"
            count_ticks(axes.xaxis)
        case "bytes_across_placement":
            title, label = (
                f"{shown} over communication",
                "bytes of collectives between participants",
            )
            byte_axis(axes, [line.get(key) or 0 for lines in runs for line in lines])
        case "wall_seconds" | "virtual_seconds":
            unit, scale = _time_unit(runs, key)
            clock = key.removesuffix("_seconds")
            title, label = f"{shown} over {clock} time", f"{clock} time ({unit})"
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(plain_text(label))
    return scale
