"""Draw time and memory of rounds over the number of clients.

    python -m fedpax.experiments.benchmarks.fedavg_round --clients=16,64,256,1024 --json=time.json
    python -m fedpax.experiments.benchmarks.fedavg_round --repetitions=0 --json=memory.json \
        --clients=16,64,256,1024,4096,16384
    python -m fedpax.experiments.benchmarks.draw_rounds time.json memory.json --out=rounds.png

Rows of several files with the same implementation and number of clients are one point: memory
comes from any file, time from the last file that timed it. Time DrJAX in a file of its own: its
temporaries slow down the calls after it. The files have one model and one number of devices.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fedpax.experiments.benchmarks.harness import Benchmark, Row, option

STYLES: dict[str, dict[str, Any]] = {
    "DrJAX": {"color": "#b3531d", "marker": "s", "zorder": 2},
    "hand-written loop": {"color": "#7a7a7a", "marker": "o", "markersize": 9, "zorder": 3},
    "fedpax": {"color": "#1d4fb3", "marker": "o", "zorder": 4},
}
NAMES = {"fedpax auto": "fedpax", "scan": "hand-written loop", "drjax": "DrJAX"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    files: list[Path] = option(
        None, "written by fedavg_round --json", Path, nargs="+", positional=True
    )


def read(settings: Settings) -> Iterator[Row]:
    """Read the rows of all files."""
    rows = [row for file in settings.files for row in json.loads(file.read_bytes())["rows"]]
    kinds = {(row["model"], row["devices"]) for row in rows}
    if len(kinds) != 1:
        raise ValueError(
            f"The files have rows of {len(kinds)} pairs of a model and a number of devices, "
            "expected 1. Measure with one --model and one number in --devices."
        )
    for row in rows:
        yield Row(**row)


def draw(settings: Settings, rows: Sequence[Row]) -> Figure:
    """Draw the rounds' median time and their temporaries over the number of clients."""
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=110)
    seconds_axes, bytes_axes = figure.subplots(1, 2)
    for round_name, style in STYLES.items():
        own = [row for row in rows if NAMES.get(row.implementation) == round_name]
        timed = {r.clients: statistics.median(r.seconds) for r in own if r.seconds}
        sizes = {row.clients: row.temporary_bytes for row in own}
        for axes, points in ((seconds_axes, timed), (bytes_axes, sizes)):
            axes.plot(*zip(*sorted(points.items()), strict=True), label=round_name, **style)
    _label(seconds_axes, "time of a round", "s")
    _label(bytes_axes, "temporary memory of a round", "B")
    bytes_axes.legend(frameon=False)
    return figure


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="clients", title=title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.grid(alpha=0.3)


main = Benchmark(
    __doc__,
    Settings,
    read,
    draw=draw,
    aliases={"--plot": "--out"},
    picture=Path("rounds.png"),
)


if __name__ == "__main__":
    raise SystemExit(main())
