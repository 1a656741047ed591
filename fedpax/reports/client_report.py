"""Metrics by client as tables and a picture: the worst, the 10th percentile, the mean, the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from fedpax.console import count_of, markdown_table
from fedpax.training.client_metrics import ClientMetrics

if TYPE_CHECKING:  # matplotlib is slow to import, and only pictures need it
    from matplotlib.axes import Axes

SMALLER_IS_BETTER = frozenset(
    {"loss", "perplexity", "calibration_error", "rmse", "mean_absolute_error"}
)
"""The metrics whose smaller values are better; larger values of all others are."""

MOST_ROWS = 20
"""Clients in the table, and with their names in the picture."""


def smaller_is_better(name: str) -> bool:
    """Return whether smaller values of a metric are better, also of clients' own models."""
    return name.removeprefix("personal_") in SMALLER_IS_BETTER


class Spread(NamedTuple):
    """How a metric differs between clients. Clients for which it is not defined are left out."""

    worst: int | None  # its place; None if no client has a finite value
    # the value that a tenth of the clients do not reach: the 10th percentile, or the 90th where
    # smaller values are better
    percentile: float
    mean: float  # each client with the same weight
    best: int | None  # its place
    defined: int  # with a finite value


def spread_of(name: str, values: Float64[np.ndarray, " clients"]) -> Spread:
    """Return how a metric differs between clients."""
    finite = np.flatnonzero(np.isfinite(values))
    if not finite.size:
        return Spread(None, math.nan, math.nan, None, 0)
    known = values[finite]
    smaller = smaller_is_better(name)
    worst, best = (known.argmax(), known.argmin()) if smaller else (known.argmin(), known.argmax())
    percentile = float(np.quantile(known, 0.9 if smaller else 0.1))
    return Spread(
        int(finite[worst]), percentile, float(known.mean()), int(finite[best]), len(finite)
    )


def format_clients(by_client: ClientMetrics) -> str:
    """Format metrics by client as two Markdown tables: their spread, and the 20 worst clients."""
    rows = []
    for name, values in by_client.metrics.items():
        spread = spread_of(name, values)
        rows.append(
            [
                name,
                _named(by_client, name, spread.worst),
                _cell(spread.percentile),
                _cell(spread.mean),
                _named(by_client, name, spread.best),
                f"{spread.defined:,}"
                + (f" of {len(values):,}" if spread.defined < len(values) else ""),
            ]
        )
    head = ["metric", "worst", "10th percentile", "mean", "best", "clients"]
    order = worst_first(by_client)
    clients = [
        [
            by_client.names[k],
            f"{by_client.num_examples[k]:,.10g}",
            *[_cell(values[k]) for values in by_client.metrics.values()],
        ]
        for k in order[:MOST_ROWS]
    ]
    tables = [
        markdown_table(head, rows),
        markdown_table(["client", by_client.unit, *by_client.metrics], clients),
    ]
    if left := len(order) - len(clients):
        tables.append(f"{count_of(left, 'more client')}; --json=FILE has all of them.")
    return "\n\n".join(tables[:2]) + "".join(f"\n{text}" for text in tables[2:])


def clients_json(by_client: ClientMetrics) -> list[dict[str, Any]]:
    """Return the metrics as JSON values, in the order of the clients; null where not defined."""
    return [
        {
            "client": name,
            by_client.unit: round(by_client.num_examples[k].item(), 6),
            **{
                metric: float(values[k]) if math.isfinite(values[k]) else None
                for metric, values in by_client.metrics.items()
            },
        }
        for k, name in enumerate(by_client.names)
    ]


def worst_first(by_client: ClientMetrics) -> Int64[np.ndarray, " clients"]:
    """Return the places of clients from the worst by the first metric to the best."""
    # Clients for which it is not defined are last.
    name, values = next(iter(by_client.metrics.items()))
    return np.argsort(-values if smaller_is_better(name) else values, kind="stable")


def plot_clients(by_client: ClientMetrics, path: str | Path) -> None:
    """Draw metrics by client, one panel for each metric, the clients from the worst to the best."""
    # Up to 20 clients have their names beside the first panel; the first metric orders them in all
    # panels. More clients are sorted in each panel.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from fedpax.pictures import COLORS, add_legend, save_picture

    names = list(by_client.metrics)
    has_rows = len(by_client.names) <= MOST_ROWS
    height = 1.6 + 0.24 * len(by_client.names) if has_rows else 3.6
    figure = Figure(
        figsize=(2.2 + 2.6 * len(names), max(height, 2.4)), dpi=150, layout="constrained"
    )
    panels = figure.subplots(1, len(names), sharey=has_rows, squeeze=False)[0]
    for name, axes in zip(names, panels, strict=True):
        _draw_metric(axes, by_client, name, has_rows=has_rows)
        if has_rows:
            axes.tick_params(axis="y", length=0)
    if has_rows:
        _name_rows(panels[0], by_client)
    styles = {"worst": (COLORS[1], "o"), "best": (COLORS[2], "o")}
    handles = [
        Line2D([], [], linestyle="", color=color, marker=marker)
        for color, marker in styles.values()
    ] + [Line2D([], [], color="dimgray", linestyle=style) for style in ("--", "-")]
    add_legend(figure, handles, [*styles, "10th percentile", "mean"])
    save_picture(figure, path)


def _draw_metric(axes: Axes, by_client: ClientMetrics, name: str, *, has_rows: bool) -> None:
    """Draw one metric: a point for each client, or the sorted values of all clients."""
    from fedpax.pictures import COLORS, note_no_values, short_text, style_panel

    values, spread = by_client.metrics[name], spread_of(name, by_client.metrics[name])
    style_panel(axes)
    axes.set_title(short_text(name.replace("_", " ")), fontsize=10)
    if spread.worst is None or spread.best is None:
        note_no_values(axes, name)
        return
    ends = {spread.worst: COLORS[1], spread.best: COLORS[2]}
    if has_rows:
        order = worst_first(by_client)
        places = np.argsort(order)
        axes.scatter(values, places, s=18, color=COLORS[0], zorder=3)
        for client, color in ends.items():
            axes.scatter(values[client], places[client], s=30, color=color, zorder=4)
        axes.axvline(spread.percentile, color="dimgray", linestyle="--", linewidth=1)
        axes.axvline(spread.mean, color="dimgray", linewidth=1)
        return
    known = np.sort(values[np.isfinite(values)])
    known = known[::-1] if smaller_is_better(name) else known
    share = 100 * (np.arange(len(known)) + 0.5) / len(known)
    axes.plot(share, known, color=COLORS[0], linewidth=1.8)
    axes.scatter(share[0], known[0], s=30, color=COLORS[1], zorder=4)
    axes.scatter(share[-1], known[-1], s=30, color=COLORS[2], zorder=4)
    axes.axhline(spread.percentile, color="dimgray", linestyle="--", linewidth=1)
    axes.axhline(spread.mean, color="dimgray", linewidth=1)
    axes.set_xlabel("% of clients, from the worst")


def _name_rows(axes: Axes, by_client: ClientMetrics) -> None:
    from fedpax.pictures import short_text

    order = worst_first(by_client)
    axes.set_yticks(range(len(order)), [short_text(by_client.names[k]) for k in order])
    axes.set_ylim(len(order) - 0.5, -0.5)


def _named(by_client: ClientMetrics, name: str, client: int | None) -> str:
    if client is None:
        return "-"
    return f"{_cell(by_client.metrics[name][client])} ({by_client.names[client]})"


def _cell(value: float) -> str:
    """Return a number, or a dash if it is not finite."""
    return f"{value:.4f}" if math.isfinite(value) else "-"
