"""The table, the picture and the JSON file of runs and their target."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedpax.extras import is_installed
from fedpax.reports.target import (
    CostToTarget,
    MetricTrajectory,
    Target,
    cost_to_target,
    format_target_table,
)
from fedpax.run_files.paths import write_atomically

if TYPE_CHECKING:  # only pictures need it
    from matplotlib.figure import Figure


def write_target_comparison(
    trajectories: Mapping[str, MetricTrajectory],
    target: Target,
    destination: str | Path,
    titles: Mapping[str, str] | None = None,
) -> str:
    """Write `target.png` and `target.json`."""
    titles = titles or {name: name for name in trajectories}
    costs = {name: cost_to_target(trajectory, target) for name, trajectory in trajectories.items()}
    if is_installed("matplotlib"):
        from fedpax.pictures import save_picture

        picture = draw_trajectories(trajectories, target, titles)
        save_picture(picture, Path(destination) / "target.png")
    content = {
        "target": target._asdict(),
        "runs": [
            {"name": name, "experiment": titles[name]}
            | {key: None if value != value else value for key, value in run_costs._asdict().items()}
            for name, run_costs in costs.items()
        ],
    }
    write_atomically(Path(destination) / "target.json", json.dumps(content, indent=2) + "\n")
    by_title: dict[str, list[CostToTarget]] = {}
    for name, run_costs in costs.items():
        by_title.setdefault(titles[name], []).append(run_costs)
    return format_target_table(by_title, target)


def draw_trajectories(
    trajectories: Mapping[str, MetricTrajectory],
    target: Target,
    titles: Mapping[str, str] | None = None,
) -> "Figure":
    """Draw the metric of each run over rounds and over bytes, with the target."""
    # If no run has a known number of bytes above zero, there is no panel over bytes.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from fedpax.pictures import (
        add_legend,
        byte_axis,
        count_ticks,
        line_style,
        note_no_values,
        short_text,
        style_panel,
    )

    titles = titles or {name: name for name in trajectories}
    styles = {
        title: line_style(number) | {"linewidth": 1.2}
        for number, title in enumerate(dict.fromkeys(titles[name] for name in trajectories))
    }
    num_bytes = [x for trajectory in trajectories.values() for x in trajectory.num_bytes if x > 0]
    columns = 2 if num_bytes else 1
    figure = Figure(figsize=(5.5 * columns, 4.5), dpi=110, layout="constrained")
    panels = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axes, label in zip(panels, ("round", "bytes of all participants"), strict=False):
        style_panel(axes)
        axes.axhline(target.value, color="gray", linewidth=0.8)
        axes.set_xlabel(label)
    count_ticks(panels[0].xaxis)
    if num_bytes:
        byte_axis(panels[1], num_bytes)
    handles = [Line2D([], [], **style) for style in styles.values()]
    for name, trajectory in trajectories.items():
        style = styles[titles[name]]
        if len(trajectory.rounds) == 1:  # a single point has no line
            style = style | {"marker": "o"}
        for axes, positions in zip(panels, (trajectory.rounds, trajectory.num_bytes), strict=False):
            axes.plot(positions, trajectory.values, **style)
    if not any(math.isfinite(x) for trajectory in trajectories.values() for x in trajectory.values):
        note_no_values(panels[0], target.metric)
    panels[0].set_ylabel(f"held-out {short_text(target.metric)}")
    add_legend(figure, handles, list(styles))
    return figure
