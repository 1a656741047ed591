"""The panels, ticks and texts of pictures, by their extents on the canvas."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedpax.data import partition_dirichlet, partition_statistics
from fedpax.populations.partition_plot import _bars, _short
from fedpax.reports.plot import draw_losses
from fedpax.reports.target import MetricTrajectory, Target, draw_trajectories


def run(rounds: int, num_bytes: float, loss: float | None = 2.0) -> list[dict[str, Any]]:
    lines = [
        {
            "kind": kind,
            "round": i,
            "loss": loss and loss / i,
            "items": 32 * i,
            "bytes_across_placement": num_bytes * i,
            "wall_seconds": 1.0 * i,
        }
        for i in range(1, rounds + 1)
        for kind in ("training", "evaluation")
    ]
    return [{"kind": "run", "round": 0, "item_unit": "examples"}, *lines]


def losses(runs: dict[str, list[dict[str, Any]]], metric: str = "loss") -> Figure:
    over = ("items", "bytes_across_placement", "wall_seconds")
    return draw_losses(runs, over=over, metrics=(metric,), training_loss=True)


def check_texts(figure: Figure) -> None:
    """Fail if two texts overlap, or one is outside of the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t not in hidden]
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in boxes:
        assert -1 <= box.x0 <= box.x1 <= width + 1 and -1 <= box.y0 <= box.y1 <= height + 1, text
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, (first, second)


def test_one_device_has_no_panel_for_bytes() -> None:
    assert len(losses({"single": run(3, 0)}).axes) == 2
    assert len(losses({"single": run(3, 0), "fedavg": run(3, 1e3)}).axes) == 3
    figure = draw_trajectories(
        {"a": MetricTrajectory([0.5], [1], [0.0], [1.0])}, Target("accuracy", 0.8)
    )
    assert len(figure.axes) == 1


@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_have_whole_ticks(rounds: int) -> None:
    numbers = list(range(1, rounds + 1))
    trajectory = MetricTrajectory([0.5] * rounds, numbers, [1e3] * rounds, [1.0] * rounds)
    axes = draw_trajectories({"a": trajectory}, Target("accuracy", 0.8)).axes[0]
    low, high = axes.get_xlim()
    assert [x for x in axes.get_xticks() if low <= x <= high] == numbers


@pytest.mark.parametrize(
    ("runs", "metric"),
    [
        ({"single": run(1, 0), "two": run(1, 0)}, "loss"),
        ({"a": run(3, 0), "b": run(3, 1e6), "c": run(3, 0, 1.99)}, "loss"),
        ({f"run_number_{i}_with_a_long_name": run(3, 10.0**i) for i in range(20)}, "loss"),
        ({"a_very_long_name_" * 8: run(3, 1e3), "cost_$x$_{": run(3, 5e3)}, "loss"),
        ({"nan": run(3, 1e3, None)}, "loss"),
        ({"huge": run(5, 1e15, 1e34)}, "loss"),
        ({"a": run(3, 1e3)}, "a_metric_with_a_name_that_is_really_long_$x"),
    ],
)
def test_texts_of_losses_do_not_overlap(runs: dict[str, Any], metric: str) -> None:
    check_texts(losses(runs, metric))


def test_texts_of_targets_do_not_overlap() -> None:
    names = [f"run_number_{i}_with_a_name_{'x' * 40}" for i in range(8)]
    trajectories = {
        name: MetricTrajectory([0.5, 0.9], [1, 10**6], [1e3, 1e12], [1.0] * 2) for name in names
    }
    check_texts(draw_trajectories(trajectories, Target("accuracy", 0.8)))
    unknown = MetricTrajectory([math.nan], [1], [math.nan], [1.0])
    check_texts(draw_trajectories({"nan": unknown}, Target("accuracy", 0.8)))


@pytest.mark.parametrize(("participants", "classes"), [(1, 1), (3, 4), (3, 100)])
def test_texts_of_partitions_do_not_overlap(participants: int, classes: int) -> None:
    labels = np.random.default_rng(0).integers(0, classes, 2000)
    parts = partition_dirichlet(labels, participants, alpha=0.5)
    statistics = partition_statistics(parts, labels)
    assert statistics.classes is not None
    classes = [f"class_{'x' * 30}_{k}" for k in statistics.classes]
    participants = [_short(f"hospital_{'x' * 30}_{k}") for k in range(len(statistics.sizes))]
    check_texts(_bars(statistics, classes, participants))
