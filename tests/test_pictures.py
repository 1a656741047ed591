"""Pictures of runs, partitions and meshes, whose labels can come from others."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedpax.pictures import plain_text, save_picture, short_text
from fedpax.populations.partition_plot import plot_partition
from fedpax.reports.plot import plot_losses

NAME = r"$\frac{$"
"""A name that is no formula."""


def draw_partition(path: Path) -> None:
    parts, labels = [np.arange(3), np.arange(3, 4)], np.array([0, 0, 1, 1])
    plot_partition(parts, labels, path, class_names=["a", NAME])


def draw_losses(path: Path) -> None:
    lines = [
        {"kind": "run", "round": 0, "item_unit": NAME},
        {"kind": "training", "round": 1, "items": 8, "bytes_across_placement": 1e6, NAME: 1.0},
        {"kind": "evaluation", "round": 1, NAME: 1.0},
    ]
    plot_losses({NAME: lines}, path, over=("items", "bytes_across_placement"), metrics=(NAME,))


@pytest.mark.parametrize("draw", [draw_partition, draw_losses])
def test_names_are_no_formulas_and_links_are_replaced(
    draw: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "picture.png").symlink_to("theirs")
    draw(tmp_path / "picture.png")
    assert (tmp_path / "theirs").read_text() == "kept"
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_powers_of_ten_stay_formulas(tmp_path: Path) -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.loglog([1, 1e6], [1, 1e6])
    axes.set_title(NAME)
    save_picture(figure, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text().count("<svg") == 1
    ticks = [text for text in axes.get_xticklabels() if "10^{" in text.get_text()]
    assert ticks and all(text.get_parse_math() for text in ticks)
    assert not axes.title.get_parse_math()


def test_texts_of_pictures_fit() -> None:
    assert plain_text("cost_$x", width=4) == "cost\n_$x"
    assert short_text("mean_absolute_error", length=9) == "mean…rror"
