"""Targets: the rounds, bytes and FLOPs that runs need until a metric reaches a value."""

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from fedpax.clients.cohort import Cohort
from fedpax.console import format_bytes, markdown_table
from fedpax.errors import ArgumentError
from fedpax.extras import is_installed
from fedpax.inspect.cost import cost
from fedpax.reports.metric_table import number_or_nan
from fedpax.run_files.paths import write_atomically
from fedpax.training.experiment import Run
from fedpax.transforms.inlining import program_placements

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Target(NamedTuple):
    """A value that a held-out metric should reach."""

    metric: str
    value: float  # the value. A loss reaches it from above, any other metric from below.

    @property
    def is_loss(self) -> bool:
        """Return whether smaller values are better."""
        return self.metric.endswith("loss")

    def first(self, values: Sequence[float]) -> int | None:
        """Return the index of the first value that reaches the target; None if none does."""
        numbers = np.asarray(values)
        reached = numbers <= self.value if self.is_loss else numbers >= self.value
        return int(np.argmax(reached)) if reached.any() else None

    def best(self, values: Sequence[float]) -> float:
        """Return the best value, without NaN."""
        known = [value for value in values if not math.isnan(value)] or [math.nan]
        return min(known) if self.is_loss else max(known)


def parse_target(text: str) -> Target:
    """Parse `METRIC=VALUE`."""
    metric, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not metric or not math.isfinite(value):
        raise ArgumentError(
            f"--target={text} is no target, expected a metric of the evaluation and a number. Set "
            "for example --target=accuracy=0.85."
        )
    return Target(metric, value)


class MetricTrajectory(NamedTuple):
    """A metric over a run, one entry per evaluation."""

    values: Sequence[float]
    rounds: Sequence[int]
    # bytes that all participants together received and sent; NaN if unknown
    num_bytes: Sequence[float]
    flops: Sequence[float]  # floating-point operations of all participants together; NaN if unknown


def trajectory_of(
    run: Run, evaluations: Sequence[Mapping[str, Any]], metric: str
) -> MetricTrajectory:
    """Add the bytes and FLOPs of participants to the evaluations of a run, by `fedpax.cost`."""
    rounds = [line["round"] for line in evaluations]
    cohort = next(run.cohorts)
    state = jax.eval_shape(lambda key: run.algorithm.init(run.init(key)), jax.random.key(0))
    frozen = () if run.frozen is None else (run.frozen.shapes,)
    has_steps = isinstance(cohort, Cohort) and cohort.num_steps is not None
    all_steps = cohort._replace(num_steps=None) if has_steps else cohort
    arguments = (state, all_steps, *frozen)
    jaxpr = jax.make_jaxpr(run.algorithm.round)(*arguments)
    if run.placement in program_placements(jaxpr.jaxpr):
        each = cost(run.algorithm.round, *arguments).placements[run.placement]
        # A single island has no other one to communicate with.
        links = 0 if (run.placement, each.size) == ("islands", 1) else 1
        num_bytes = float(links * (each.broadcast_bytes + each.sent_bytes))
        size, full_flops = each.size, each.size * each.flops
    else:  # the round is not a fedpax program
        size, num_bytes, full_flops = 0, math.nan, math.nan
    numbers, fractions = [size] * max(rounds), [1.0] * max(rounds)
    if isinstance(cohort, Cohort) and any(x is not None for x in cohort[1:4]):
        steps = jax.tree.leaves(cohort.batches)[0].shape[1]
        later = (next(run.cohorts) for _ in range(max(rounds) - 1))
        valid = [_valid_steps(c, steps) for c in itertools.chain([cohort], later)]
        numbers = [int(np.count_nonzero(x)) for x in valid]
        fractions = [float(np.mean(x) / steps) for x in valid]
    sent, flops = num_bytes * np.cumsum(numbers), full_flops * np.cumsum(fractions)
    return MetricTrajectory(
        values=[number_or_nan(line.get(metric)) for line in evaluations],
        rounds=rounds,
        num_bytes=[float(sent[number - 1]) for number in rounds],
        flops=[float(flops[number - 1]) for number in rounds],
    )


def _valid_steps(cohort: Cohort, steps: int) -> np.ndarray:
    """Return the number of steps of each participant: 0 of those that are absent."""
    size = jax.tree.leaves(cohort.batches)[0].shape[0]
    valid = np.full(size, steps) if cohort.num_steps is None else np.asarray(cohort.num_steps)
    if cohort.client_ids is not None:
        valid = np.where(np.asarray(cohort.client_ids) >= 0, valid, 0)
    if cohort.num_examples is not None:
        valid = np.where(np.asarray(cohort.num_examples) > 0, valid, 0)
    return valid


class CostToTarget(NamedTuple):
    """Rounds, bytes and FLOPs of a run until the target."""

    rounds: int | None  # number of rounds; None if the target was not reached
    num_bytes: float  # bytes that all participants together received and sent; NaN if not reached
    flops: float  # floating-point operations of all participants together; NaN if not reached
    best: float  # the best value of all evaluations


def cost_to_target(trajectory: MetricTrajectory, target: Target) -> CostToTarget:
    """Return the costs at the first evaluation that reaches the target."""
    best, index = target.best(trajectory.values), target.first(trajectory.values)
    if index is None:
        return CostToTarget(None, math.nan, math.nan, best)
    return CostToTarget(
        trajectory.rounds[index], trajectory.num_bytes[index], trajectory.flops[index], best
    )


def format_target_table(costs: Mapping[str, Sequence[CostToTarget]], target: Target) -> str:
    """Format the costs as a Markdown table, the experiment with the fewest rounds first."""
    sign = 1 if target.is_loss else -1

    def order(name: str) -> tuple[int, float, float]:
        rounds = [cost.rounds for cost in costs[name] if cost.rounds is not None]
        missed = len(costs[name]) - len(rounds)
        best = statistics.fmean(cost.best for cost in costs[name])
        return missed, statistics.fmean(rounds or [math.inf]), sign * best

    head = [
        "experiment",
        f"rounds to {target.metric} {target.value:g}",
        "bytes",
        "FLOPs",
        f"best {target.metric}",
    ]
    rows = []
    for name in sorted(costs, key=order):
        run_costs = costs[name]
        best = _format_mean([cost.best for cost in run_costs], ".4f")
        rounds = [cost.rounds for cost in run_costs if cost.rounds is not None]
        if not rounds:
            rows.append([name, "not reached", "-", "-", best])
            continue
        text = _format_mean(rounds, ",.1f" if len(rounds) > 1 else ",.0f")
        if len(rounds) < len(run_costs):
            text += f" ({len(rounds)} of {len(run_costs)})"
        reached = [cost for cost in run_costs if cost.rounds is not None]
        num_bytes = statistics.fmean(cost.num_bytes for cost in reached)
        flops = statistics.fmean(cost.flops for cost in reached)
        shown = f"{flops:.3g}" if math.isfinite(flops) else "unknown"
        rows.append([name, text, format_bytes(num_bytes), shown, best])
    return markdown_table(head, rows)


def _format_mean(numbers: Sequence[float], digits: str) -> str:
    mean = f"{statistics.fmean(numbers):{digits}}"
    return mean if len(numbers) == 1 else f"{mean} ± {statistics.stdev(numbers):{digits}}"


# ---- the table, the picture and the JSON file of runs and their target


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
