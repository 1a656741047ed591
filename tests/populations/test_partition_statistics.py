import struct
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from fedpax.data import (
    partition_by_quantity,
    partition_dirichlet,
    partition_iid,
    partition_natural,
    partition_statistics,
    plot_partition,
)
from fedpax.pictures import Picture
from fedpax.populations.partition_plot import COLORS, _overview
from fedpax.populations.partition_statistics import PartitionStatistics


@given(
    st.lists(st.integers(-2, 6), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 1000)
)
def test_agrees_with_loops_over_participants(
    labels: list[int], participants: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, participants, len(labels))  # some may have no examples
    partition = [np.flatnonzero(owner == k) for k in range(participants)]
    result = partition_statistics(partition, labels)

    sizes = [len(indices) for indices in partition]
    assert result.num_examples == len(labels)
    assert result.sizes.tolist() == sizes
    assert (result.smallest, result.largest) == (min(sizes), max(sizes))
    assert result.median == np.median(sizes) and result.mean == np.mean(sizes)
    assert result.coefficient_of_variation == pytest.approx(np.std(sizes) / np.mean(sizes))
    difference = np.mean([abs(a - b) for a in sizes for b in sizes])
    assert result.gini == pytest.approx(difference / (2 * np.mean(sizes)), abs=1e-12)

    classes = sorted(set(labels))
    counts = [[sum(labels[i] == c for i in indices) for c in classes] for indices in partition]
    assert result.classes is not None and result.classes.tolist() == classes
    assert result.label_counts is not None and result.label_counts.tolist() == counts

    def entropy(p: np.ndarray) -> float:
        return -sum(x * np.log(x) for x in p if x > 0)

    overall = np.sum(counts, axis=0) / len(labels)
    own = [np.array(row) / sum(row) for row in counts if sum(row)]
    assert result.overall_entropy == pytest.approx(entropy(overall), abs=1e-12)
    assert result.label_entropy == pytest.approx(np.mean([entropy(p) for p in own]), abs=1e-12)
    assert result.labels_per_participant == pytest.approx(
        np.mean([np.count_nonzero(p) for p in own])
    )
    distances = [np.abs(p - overall).sum() / 2 for p in own]
    assert result.total_variation == pytest.approx(np.mean(distances), abs=1e-12)


def test_extreme_partitions_have_known_measures() -> None:
    labels = np.arange(1000) % 10
    alike = partition_statistics([np.arange(0, 1000, 10)], labels)
    assert alike.gini == 0 and alike.labels_per_participant == 1 and alike.total_variation == 0
    apart = partition_statistics([np.flatnonzero(labels == k) for k in range(10)], labels)
    assert apart.gini == 0 and apart.label_entropy == 0
    assert apart.overall_entropy == pytest.approx(np.log(10))
    assert apart.total_variation == pytest.approx(0.9)
    unequal = partition_statistics([np.arange(991), *(np.array([k]) for k in range(991, 1000))])
    assert unequal.gini == pytest.approx(0.9 * (991 - 1) / 1000)


def test_a_smaller_alpha_gives_more_skew(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 10, 5000)
    result = [
        partition_statistics(partition_dirichlet(labels, 20, alpha=alpha), labels)
        for alpha in (0.05, 0.5, 5, 500)
    ]
    for name in ("total_variation", "coefficient_of_variation", "gini"):
        values = [getattr(statistics, name) for statistics in result]
        assert values == sorted(values, reverse=True)
    for name in ("label_entropy", "labels_per_participant"):
        values = [getattr(statistics, name) for statistics in result]
        assert values == sorted(values)


def test_labels_without_examples_are_excluded() -> None:
    result = partition_statistics([np.array([0]), np.array([2])], [5, 6, 7])
    assert result.classes is not None and result.classes.tolist() == [5, 7]
    assert result.label_counts is not None and result.label_counts.tolist() == [[1, 0], [0, 1]]
    assert result.total_variation == 0.5


def test_the_table_is_aligned_and_omits_labels_if_there_are_none(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 4, 12_345)
    parts = partition_dirichlet(labels, 9, alpha=0.3)
    full, short = str(partition_statistics(parts, labels)), str(partition_statistics(parts))
    for text, lines in (full, 15), (short, 10):
        assert len(text.splitlines()) == lines
        assert len({len(line) for line in text.splitlines()}) == 1
    assert "| examples                 |     12,345 |" in full
    assert "nats" not in short and "label" not in short


def test_statistics_are_immutable() -> None:
    result = partition_statistics(partition_iid(30, 3))
    assert isinstance(result, PartitionStatistics) and result.classes is None
    with pytest.raises(AttributeError):
        result.gini = 1.0  # type: ignore[misc]


def test_bad_partitions_and_labels_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no examples: assign at least one"):
        partition_statistics([np.array([], np.int64)])
    for parts, outside in ([[0], [3]], 3), ([[0], [-1]], -1):
        partition = [np.array(indices) for indices in parts]
        with pytest.raises(ValueError, match=f"has index {outside}, but there are 3 labels"):
            partition_statistics(partition, [0, 1, 2])
    with pytest.raises(ValueError, match="one-hot rows with"):
        partition_statistics([np.array([0])], np.eye(2, dtype=int))
    with pytest.raises(
        ValueError, match=r"labels are 0 to 2, but class_names has names for 0 to 1: give"
    ):
        plot_partition([np.arange(3)], [0, 1, 2], tmp_path / "x.png", class_names=["a", "b"])
    assert not list(tmp_path.iterdir())


def pixels(path: Path, color: str) -> int:
    """Count the pixels of a color."""
    picture = imread(path)[..., :3]
    return int((np.abs(picture - np.array(to_rgb(color))).max(axis=-1) < 0.01).sum())


def test_bars_have_lengths_in_proportion_to_label_counts(tmp_path: Path) -> None:
    counts = [[700, 100, 0], [0, 300, 500], [200, 0, 200]]
    labels = np.concatenate([np.repeat(np.arange(3), row) for row in counts])
    partition = np.split(np.arange(2000), [800, 1600])
    plot_partition(partition, labels, tmp_path / "x.png", class_names=["cat", "dog", "frog"])
    seen = np.array([pixels(tmp_path / "x.png", color) for color in COLORS[:3]])
    expected = np.sum(counts, axis=0)
    # Lines between bars and the squares of the legend are less than 5 %.
    assert np.abs(seen / seen.sum() / (expected / expected.sum()) - 1).max() < 0.05


def test_participants_are_named_beside_their_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[list[str]] = []

    def keep(figure: Figure, path: Path) -> None:
        shown.append([text.get_text() for text in figure.axes[0].get_yticklabels()])

    monkeypatch.setattr("fedpax.pictures.save_picture", keep)
    parts = partition_natural(["b", "ö$x$", "b"])
    plot_partition(parts, None, tmp_path / "x.png")
    plot_partition([*parts], None, tmp_path / "x.png", participant_names=["Åre" * 20, 7])
    plot_partition([*parts], None, tmp_path / "x.png")
    assert shown == [["b", r"ö\$x\$"], [("Åre" * 20)[:29] + "…", "7"], ["0", "1"]]
    with pytest.raises(ValueError, match="participant_names has 1 names, expected one for each"):
        plot_partition(parts, None, tmp_path / "x.png", participant_names=["b"])


def test_the_figure_is_returned_for_notebooks(tmp_path: Path) -> None:
    parts = [np.arange(3), np.arange(3, 9)]
    figure = plot_partition(parts, None, tmp_path / "x.png")
    again = plot_partition(parts, None)
    assert isinstance(again, Picture)
    assert figure._repr_png_() == again._repr_png_() == (tmp_path / "x.png").read_bytes()


def test_the_map_shows_the_frequency_of_each_label(tmp_path: Path) -> None:
    labels = np.arange(2000) % 4
    pure = [np.arange(k, 2000, 200) for k in range(200)]  # each has one label
    plot_partition(pure, labels, tmp_path / "pure.png", max_participants=10)
    plot_partition(partition_iid(2000, 200), labels, tmp_path / "iid.png", max_participants=10)
    dark = "#08306b"  # the end of the scale: all examples have the label
    assert pixels(tmp_path / "pure.png", dark) > 0.2 * 250_000  # a quarter of the map
    assert pixels(tmp_path / "iid.png", dark) < 2000  # the scale itself


@pytest.mark.parametrize(("participants", "labels"), [(30, 7), (1300, 7), (30, 270), (1300, 270)])
def test_every_column_of_the_map_is_a_distribution(
    participants: int, labels: int, rng: np.random.Generator
) -> None:
    shown = rng.integers(0, labels, 9000)
    parts = partition_dirichlet(shown, participants, alpha=0.3)
    figure = _overview(partition_statistics(parts, shown), [str(k) for k in range(labels)])
    cells = np.asarray(figure.axes[1].images[0].get_array())
    assert cells.shape == (min(labels, 100), min(participants, 500))
    assert cells.min() >= 0 and np.abs(cells.sum(axis=0) - 1).max() < 1e-9


@pytest.mark.parametrize("sigma", [0.001, 0.1, 0.4, 3.0])
def test_the_histogram_counts_every_participant(sigma: float) -> None:
    parts = partition_by_quantity(20_000, 300, sigma=sigma)
    axes = _overview(partition_statistics(parts), None).axes[0]
    bars = [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in axes.patches]
    for indices in parts:  # every size is in exactly one bar, and within the axis
        assert sum(x < len(indices) < x + width for x, width, _ in bars) == 1
        assert axes.get_xlim()[0] < len(indices) < axes.get_xlim()[1]
    assert sum(height for _, _, height in bars) == 300
    assert axes.get_xscale() == ("log" if sigma > 1 else "linear")


@pytest.mark.parametrize(
    ("participants", "classes", "examples"),
    [(1, 1, 1), (3, 100, 400), (60, 150, 3000), (7, 0, 90), (70, 0, 9000)],
)
def test_every_kind_of_picture_is_written(
    participants: int, classes: int, examples: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    labels = rng.integers(0, classes, examples) if classes else None
    if labels is None:
        partition = partition_by_quantity(examples, participants, sigma=2.0)
    else:
        partition = partition_dirichlet(labels, participants, alpha=0.1)
    plot_partition(partition, labels, tmp_path / "x.png")
    header = (tmp_path / "x.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width == 1650 and 250 < height < 1700
    picture = imread(tmp_path / "x.png")[..., 0]
    assert 0.03 < (picture < 0.95).mean() < 0.98  # neither empty nor one block


def test_indices_that_are_no_integers_raise() -> None:
    with pytest.raises(ValueError, match=r"The partition has the value 0.5 \(float64\)"):
        partition_statistics([np.array([0.0, 0.5]), np.array([2])], np.array([0, 1, 2]))
    with pytest.raises(TypeError, match=r"partition is a generator, expected.*list\(partition\)"):
        partition_statistics(part for part in ([0], [1]))
