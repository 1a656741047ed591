"""Pictures of partitions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.errors import ArgumentError
from fedpax.extras import optional
from fedpax.populations.partition import Partition
from fedpax.populations.partition_statistics import PartitionStatistics, partition_statistics

if TYPE_CHECKING:  # matplotlib is slow to import, and only pictures need it
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's color-blind safe palette, and three more colors.
COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9",
    "#D55E00", "#F0E442", "#882255", "#BBBBBB", "#332288",
)  # fmt: skip


@optional("plot_partition()")
def plot_partition(
    partition: Partition,
    labels: ArrayLike | None,
    path: str | Path | None = None,
    *,
    class_names: Sequence[str] | None = None,
    participant_names: Sequence[Any] | None = None,
    max_participants: int = 40,
) -> "Figure":
    """Draw the sizes and labels of a partition's participants.

    Up to `max_participants` are bars, divided by label. More are a histogram of sizes and a heat
    map of label frequencies, sorted by the most frequent label.

    Args:
        partition: for each participant the indices of its examples.
        labels: integers `[examples]`, one for each example of the source; None draws sizes alone.
        path: the PNG file to write. Default None: write no file.
        class_names: the names of the labels 0, 1, .... Default None: use the numbers.
        participant_names: the names beside the bars. Default None: the partition's names, else the
            numbers.
        max_participants: the largest number of participants to draw as bars.

    Returns:
        The figure, which a notebook shows.

    Raises:
        ValueError: as in `partition_statistics`; a label has no name in `class_names`; or there is
            another number of `participant_names` than of participants.
    """
    statistics = partition_statistics(partition, labels)
    if participant_names is None:
        names: Sequence[str] | None = getattr(partition, "names", None)
        participant_names = names if names is not None else range(len(statistics.sizes))
    return plot_statistics(
        statistics,
        path,
        class_names=class_names,
        participant_names=participant_names,
        max_participants=max_participants,
    )


def plot_statistics(
    statistics: PartitionStatistics,
    path: str | Path | None,
    *,
    class_names: Sequence[str] | None,
    participant_names: Sequence[Any],
    max_participants: int = 40,
) -> "Figure":
    """Draw what `plot_partition` draws of a partition with these statistics."""
    names = _names(statistics.classes, class_names)
    if len(statistics.sizes) > max_participants:
        return _saved(_overview(statistics, names), path)
    if len(participant_names) != len(statistics.sizes):
        raise ArgumentError(
            f"participant_names has {len(participant_names)} names, expected one for each of the "
            f"{len(statistics.sizes)} participants."
        )
    texts = [_short(str(name)) for name in participant_names]
    return _saved(_bars(statistics, names, texts), path)


def _saved(figure: "Figure", path: str | Path | None) -> "Figure":
    """Write a figure to a file, if there is one, and return it."""
    from fedpax.pictures import save_picture

    if path is not None:
        save_picture(figure, path)
    return figure


def _short(name: str) -> str:
    """Shorten a name to fit beside a bar; a dollar sign does not begin a formula."""
    return (name if len(name) <= 30 else name[:29] + "…").replace("$", r"\$")


def _names(
    classes: NDArray[np.int64] | None, class_names: Sequence[str] | None
) -> list[str] | None:
    """Return the name of each label, or None without labels."""
    if classes is None:
        return None
    if class_names is None:
        return [str(label) for label in classes]
    if classes[0] < 0 or classes[-1] >= len(class_names):
        raise ArgumentError(
            f"The labels are {classes[0]} to {classes[-1]}, but class_names has names for 0 to "
            f"{len(class_names) - 1}: give a name for each label."
        )
    return [class_names[label] for label in classes]


def _bars(
    statistics: PartitionStatistics, names: list[str] | None, participant_names: list[str]
) -> "Figure":
    """Draw one bar per participant, as long as its number of examples and divided by label."""
    from matplotlib.patches import Patch

    from fedpax.pictures import Picture, add_legend

    participants = len(statistics.sizes)
    height = 1.6 + 0.25 * participants
    if names is not None and len(names) > len(COLORS):
        height = max(height, 4.8)  # for the names beside the color bar
    figure = Picture(figsize=(11, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    counts = statistics.sizes[:, None] if names is None else statistics.label_counts
    assert counts is not None
    colors = _colors(counts.shape[1])
    starts = np.cumsum(counts, axis=1) - counts
    for k in range(participants):
        present = np.flatnonzero(counts[k])
        axes.broken_barh(
            list(zip(starts[k, present], counts[k, present], strict=True)),
            (k - 0.4, 0.8),
            facecolors=colors[present],
            edgecolor="white",
            linewidth=0.3,
        )
    _style_axes(axes, "examples", "participant")
    axes.set_xlim(0, 1.01 * statistics.largest)
    axes.set_ylim(participants - 0.5, -0.5)  # the first at the top
    axes.set_yticks(range(participants), participant_names)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_title(_title(statistics), loc="left", fontweight="bold")
    _note(axes, "\n".join(_notes(statistics)))  # long names make the axes narrow
    if names is not None and len(names) <= len(COLORS):
        patches = [Patch(color=color) for color in colors]
        add_legend(figure, patches, names, handlelength=1, handleheight=1)
    elif names is not None:
        _color_bar(axes, colors, names)
    return figure


def _overview(statistics: PartitionStatistics, names: list[str] | None) -> "Figure":
    from fedpax.pictures import Picture

    figure = Picture(figsize=(11, 4.8), dpi=150, layout="constrained")
    if names is None:
        _histogram(figure.subplots(), statistics)
    else:
        left, right = figure.subplots(1, 2, width_ratios=(1, 2))
        _histogram(left, statistics)
        _label_map(right, statistics, names)
    for axes, text in zip(figure.axes, _notes(statistics), strict=False):  # skips the color bar
        _note(axes, text)
    figure.suptitle(_title(statistics), x=0.01, ha="left", fontweight="bold")
    return figure


def _histogram(axes: "Axes", statistics: PartitionStatistics) -> None:
    from fedpax.pictures import log_ticks

    smallest, largest = statistics.smallest, statistics.largest
    logarithmic = largest > 50 * smallest > 0
    if logarithmic:
        edges = np.unique(np.rint(np.geomspace(smallest, largest + 1, 30)).astype(np.int64))
    else:  # the same number of sizes in every bin, so that counts can be compared
        width = -(-(largest - smallest + 1) // 40)
        edges = np.arange(smallest, largest + width + 1, width)
    counts, _ = np.histogram(statistics.sizes, edges)
    axes.bar(
        edges[:-1] - 0.5, counts, np.diff(edges), align="edge",
        color=COLORS[0], edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    _style_axes(axes, "examples per participant", "participants")
    axes.grid(False, axis="x")
    if logarithmic:
        axes.set_xscale("log")
        log_ticks(axes.xaxis, largest / smallest)
    elif len(edges) < 10:  # few different sizes, or one
        middle = (edges[0] + edges[-1] - 1) / 2
        axes.set_xlim(max(middle - 5.5, -0.5), middle + 5.5)


def _label_map(axes: "Axes", statistics: PartitionStatistics, names: list[str]) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import PercentFormatter

    counts, sizes = statistics.label_counts, statistics.sizes
    assert counts is not None
    frequencies = counts[sizes > 0] / sizes[sizes > 0, None]
    participants, labels = frequencies.shape
    order = np.lexsort((-frequencies.max(axis=1), frequencies.argmax(axis=1)))
    starts, widths = _even_ranges(participants, 500)
    columns = np.add.reduceat(frequencies[order], starts) / widths[:, None]
    rows, _ = _even_ranges(labels, 100)
    # A square-root color scale makes a uniform distribution over 100 labels visible.
    image = axes.imshow(
        np.add.reduceat(columns, rows, axis=1).T,
        aspect="auto",
        cmap="Blues",
        norm=PowerNorm(0.5, 0, 1),
        extent=(0, participants, len(rows) - 0.5, -0.5),
    )
    _style_axes(axes, "participants, sorted by their most frequent label", "label")
    axes.grid(False)
    _name_ticks(axes.yaxis, [names[row] for row in rows])
    bar = axes.figure.colorbar(
        image, ax=axes, pad=0.02, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1], label="frequency"
    )
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    bar.outline.set_visible(False)


def _even_ranges(length: int, max_ranges: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split 0, ..., `length` - 1 into at most `max_ranges` ranges; return starts and sizes."""
    num_ranges = min(length, max_ranges)
    starts = np.arange(num_ranges) * length // num_ranges
    return starts, np.diff(starts, append=length)


def _colors(number: int) -> NDArray[np.float64]:
    """Return the labels' colors `[number, 4]`: a palette for few labels, a scale for many."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba_array

    if number <= len(COLORS):
        return to_rgba_array(COLORS[:number])
    return colormaps["turbo"](np.linspace(0.02, 0.98, number))


def _color_bar(axes: "Axes", colors: NDArray[np.float64], names: list[str]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    scale = ScalarMappable(Normalize(-0.5, len(names) - 0.5), ListedColormap(colors))
    bar = axes.figure.colorbar(scale, ax=axes, pad=0.02, aspect=40, label="label")
    bar.ax.invert_yaxis()
    bar.outline.set_visible(False)
    _name_ticks(bar.ax.yaxis, names)


def _name_ticks(axis: "Axis", names: list[str]) -> None:
    """Name the positions 0, 1, ... of an axis, or at most 20 evenly spaced ones."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    from fedpax.pictures import short_text

    step = -(-len(names) // 20)
    names = [short_text(name) for name in names]
    axis.set_major_locator(FixedLocator(range(0, len(names), step)))
    axis.set_major_formatter(FixedFormatter(names[::step]))
    axis.set_tick_params(length=0)


def _style_axes(axes: "Axes", horizontal: str, vertical: str) -> None:
    from fedpax.pictures import count_ticks, style_panel

    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    for axis in (axes.xaxis, axes.yaxis):
        count_ticks(axis)
    style_panel(axes)


def _note(axes: "Axes", text: str) -> None:
    """Write a small note above the axes, on the right."""
    axes.set_title(text, loc="right", fontsize=9, color="dimgray")


def _title(statistics: PartitionStatistics) -> str:
    participants, examples = len(statistics.sizes), statistics.num_examples
    return (
        f"{participants:,} participant{'s' * (participants != 1)}, "
        f"{examples:,} example{'s' * (examples != 1)}"
    )


def _notes(statistics: PartitionStatistics) -> list[str]:
    """Return the notes on sizes and, if there are labels, on labels."""
    texts = [f"Gini coefficient of sizes {statistics.gini:.2f}"]
    if statistics.total_variation is not None:
        texts.append(f"total variation distance of labels {statistics.total_variation:.2f}")
    return texts
