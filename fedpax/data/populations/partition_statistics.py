"""How a partition divides examples and labels: numbers, a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.data.populations.partition import Partition, number_labels

if TYPE_CHECKING:  # matplotlib takes longer to import than all the rest, and only pictures need it
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people who see colours differently can tell apart, and more.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9",
    "#D55E00", "#F0E442", "#882255", "#BBBBBB", "#332288",
)  # fmt: skip


class PartitionStatistics(NamedTuple):
    """What ``partition_statistics`` found; as a string, a table.

    What is said of labels is None where no labels were given. Means are over participants, each
    counted once, and those over labels leave out participants without examples.

    Attributes:
        examples: how many examples the participants have together.
        sizes: how many each has, int64 [participants].
        smallest: the least of the sizes.
        median: their median.
        mean: their mean.
        largest: the greatest of them.
        variation: their coefficient of variation, standard deviation over mean.
        gini: their Gini coefficient: 0 if all are equal, towards 1 if one participant has all.
        classes: the labels that occur, ascending, int64 [classes].
        label_counts: how many examples of each label each has, int64 [participants, classes].
        labels_held: how many labels a participant has, in the mean.
        label_entropy: the entropy of a participant's labels, in nats, in the mean.
        overall_entropy: the entropy of the labels of all participants together, in nats.
        total_variation: half the sum over labels of how far a participant's frequencies are from
            those of all together, in the mean: 0 if they agree, towards 1 the less they do.
    """

    examples: int
    sizes: NDArray[np.int64]
    smallest: int
    median: float
    mean: float
    largest: int
    variation: float
    gini: float
    classes: NDArray[np.int64] | None = None
    label_counts: NDArray[np.int64] | None = None
    labels_held: float | None = None
    label_entropy: float | None = None
    overall_entropy: float | None = None
    total_variation: float | None = None

    def __str__(self) -> str:
        rows = [
            ("partition", "value"),
            ("participants", f"{len(self.sizes):,}"),
            ("examples", f"{self.examples:,}"),
            ("smallest participant", f"{self.smallest:,}"),
            ("median participant", f"{self.median:,.1f}"),
            ("mean participant", f"{self.mean:,.1f}"),
            ("largest participant", f"{self.largest:,}"),
            ("coefficient of variation", f"{self.variation:.3f}"),
            ("Gini coefficient", f"{self.gini:.3f}"),
        ]
        if self.classes is not None:
            rows += [
                ("labels", f"{len(self.classes):,}"),
                ("labels of a participant", f"{self.labels_held:,.1f}"),
                ("entropy of its labels", f"{self.label_entropy:.3f} nats"),
                ("entropy of all labels", f"{self.overall_entropy:.3f} nats"),
                ("total variation from all", f"{self.total_variation:.3f}"),
            ]
        left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
        lines = [f"| {name:{left}} | {value:>{right}} |" for name, value in rows]
        lines.insert(1, f"|{'-' * (left + 2)}|{'-' * (right + 2)}|")
        return "\n".join(lines)


def partition_statistics(
    partition: Partition, labels: ArrayLike | None = None
) -> PartitionStatistics:
    """Measures how participants differ in the amounts and the labels of their examples.

    Random samples differ from the whole too, and more so the smaller they are: to know how much,
    measure ``partition_iid`` with as many participants.

    Args:
        partition: the indices of each participant's examples.
        labels: integers [examples], one for each example of the source.

    Returns:
        The measures, which ``print`` shows as a table.

    Raises:
        ValueError: if nobody has an example, the labels are not integers [examples], or the
            partition names examples that have no label.

    Example:
        >>> partition = [np.array([0, 1, 2]), np.array([3])]
        >>> print(partition_statistics(partition, labels=[7, 7, 8, 8]))
        | partition                |      value |
        |--------------------------|------------|
        | participants             |          2 |
        | examples                 |          4 |
        | smallest participant     |          1 |
        | median participant       |        2.0 |
        | mean participant         |        2.0 |
        | largest participant      |          3 |
        | coefficient of variation |      0.500 |
        | Gini coefficient         |      0.250 |
        | labels                   |          2 |
        | labels of a participant  |        1.5 |
        | entropy of its labels    | 0.318 nats |
        | entropy of all labels    | 0.693 nats |
        | total variation from all |      0.333 |
    """
    sizes = np.array([len(held) for held in partition], np.int64)
    participants, examples = len(sizes), int(sizes.sum())
    if not examples:
        raise ValueError("The partition has no examples: give at least one participant some.")
    # Half the mean absolute difference of two participants, over the mean.
    places = 2 * np.arange(1, participants + 1) - participants - 1
    gini = float(places @ np.sort(sizes)) / (participants * examples)
    statistics = PartitionStatistics(
        examples=examples,
        sizes=sizes,
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        mean=float(sizes.mean()),
        largest=int(sizes.max()),
        variation=float(sizes.std() / sizes.mean()),
        gini=gini,
    )
    if labels is None:
        return statistics
    all_classes, numbers = number_labels(labels)
    indices = np.concatenate([np.asarray(held, np.int64) for held in partition])
    if indices.min() < 0 or indices.max() >= len(numbers):
        stray = indices.min() if indices.min() < 0 else indices.max()
        raise ValueError(
            f"The partition names example {stray}, but there are {len(numbers)} labels: give the "
            "labels of the source that it was made for, one for each example."
        )
    holder = np.repeat(np.arange(participants), sizes)
    cells = holder * len(all_classes) + numbers[indices]
    counts = np.bincount(cells, minlength=participants * len(all_classes))
    counts = counts.reshape(participants, len(all_classes))
    occurs = counts.any(axis=0)
    counts = counts[:, occurs]
    frequencies = counts[sizes > 0] / sizes[sizes > 0, None]
    overall = counts.sum(axis=0) / examples
    return statistics._replace(
        classes=all_classes[occurs],
        label_counts=counts,
        labels_held=float((frequencies > 0).sum(axis=1).mean()),
        label_entropy=float(_entropy(frequencies).mean()),
        overall_entropy=float(_entropy(overall)),
        total_variation=float(np.abs(frequencies - overall).sum(axis=1).mean() / 2),
    )


def plot_partition(
    partition: Partition,
    labels: ArrayLike | None,
    path: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    max_participants: int = 40,
) -> None:
    """Draws what each participant holds.

    Up to ``max_participants`` each have a bar, divided by label. More are drawn together: how many
    have how many examples, and a map of the frequencies of labels over the participants, which are
    sorted by their most frequent label. Where there are more than 500, a column of the map is the
    mean of neighbours; where there are more than 100 labels, a row is the sum of neighbours.

    Args:
        partition: the indices of each participant's examples.
        labels: integers [examples], one for each example of the source; None to draw amounts
            alone.
        path: the PNG to write.
        class_names: the names of the labels 0, 1, ...; by default the numbers.
        max_participants: how many participants have a bar each.

    Raises:
        ValueError: as ``partition_statistics``, or if a label has no name.
    """
    statistics = partition_statistics(partition, labels)
    names = _names(statistics.classes, class_names)
    few = len(statistics.sizes) <= max_participants
    figure = _bars(statistics, names) if few else _overview(statistics, names)
    figure.savefig(path)


def _entropy(frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """In nats, over the last axis."""
    logs = np.log(frequencies, where=frequencies > 0, out=np.zeros_like(frequencies))
    return -(frequencies * logs).sum(axis=-1)


def _names(
    classes: NDArray[np.int64] | None, class_names: Sequence[str] | None
) -> list[str] | None:
    if classes is None:
        return None
    if class_names is None:
        return [str(label) for label in classes]
    if classes[0] < 0 or classes[-1] >= len(class_names):
        raise ValueError(
            f"The labels are {classes[0]} to {classes[-1]}, but class_names names 0 to "
            f"{len(class_names) - 1}: give a name for each."
        )
    return [class_names[label] for label in classes]


def _bars(statistics: PartitionStatistics, names: list[str] | None) -> "Figure":
    """A bar for each participant, as long as it has examples, and divided by label."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    participants = len(statistics.sizes)
    figure = Figure(figsize=(11, 1.6 + 0.25 * participants), dpi=150, layout="constrained")
    axes = figure.subplots()
    counts = statistics.sizes[:, None] if names is None else statistics.label_counts
    assert counts is not None
    colours = _colours(counts.shape[1])
    begins = np.cumsum(counts, axis=1) - counts
    for k in range(participants):
        held = np.flatnonzero(counts[k])
        axes.broken_barh(
            list(zip(begins[k, held], counts[k, held], strict=True)),
            (k - 0.4, 0.8),
            facecolors=colours[held],
            edgecolor="white",
            linewidth=0.3,
        )
    _dress(axes, "examples", "participant")
    axes.set_xlim(0, 1.01 * statistics.largest)
    axes.set_ylim(participants - 0.5, -0.5)  # the first at the top
    axes.set_yticks(range(participants))
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_title(_counted(statistics), loc="left", fontweight="bold")
    _note(axes, ", ".join(_measured(statistics)))
    if names is not None and len(names) <= len(COLOURS):
        figure.legend(
            handles=[Patch(color=c, label=n) for c, n in zip(colours, names, strict=True)],
            loc="outside lower center",
            ncols=len(names) if sum(map(len, names)) < 70 else 5,  # what fits a line
            frameon=False,
            handlelength=1,
            handleheight=1,
        )
    elif names is not None:
        _colour_bar(axes, colours, names)
    return figure


def _overview(statistics: PartitionStatistics, names: list[str] | None) -> "Figure":
    """How many participants have how many examples, and the labels of all participants."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    if names is None:
        _histogram(figure.subplots(), statistics)
    else:
        left, right = figure.subplots(1, 2, width_ratios=(1, 2))
        _histogram(left, statistics)
        _label_map(right, statistics, names)
    for axes, text in zip(figure.axes, _measured(statistics), strict=False):  # not the colour bar
        _note(axes, text)
    figure.suptitle(_counted(statistics), x=0.01, ha="left", fontweight="bold")
    return figure


def _histogram(axes: "Axes", statistics: PartitionStatistics) -> None:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    smallest, largest = statistics.smallest, statistics.largest
    logarithmic = largest > 50 * smallest > 0
    if logarithmic:
        edges = np.unique(np.rint(np.geomspace(smallest, largest + 1, 30)).astype(np.int64))
    else:  # as many sizes to a bin, so that none looks fuller for having more
        width = -(-(largest - smallest + 1) // 40)
        edges = np.arange(smallest, largest + width + 1, width)
    counts, _ = np.histogram(statistics.sizes, edges)
    axes.bar(
        edges[:-1] - 0.5, counts, np.diff(edges), align="edge",
        color=COLOURS[0], edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    _dress(axes, "examples of a participant", "participants")
    axes.grid(False, axis="x")
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif len(edges) < 10:  # few sizes, perhaps one
        middle = (edges[0] + edges[-1] - 1) / 2
        axes.set_xlim(max(middle - 5.5, -0.5), middle + 5.5)


def _label_map(axes: "Axes", statistics: PartitionStatistics, names: list[str]) -> None:
    """The frequency of each label at each participant."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import PercentFormatter

    counts, sizes = statistics.label_counts, statistics.sizes
    assert counts is not None
    frequencies = counts[sizes > 0] / sizes[sizes > 0, None]
    participants, labels = frequencies.shape
    order = np.lexsort((-frequencies.max(axis=1), frequencies.argmax(axis=1)))
    begins, widths = _stretches(participants, 500)
    columns = np.add.reduceat(frequencies[order], begins) / widths[:, None]
    rows, _ = _stretches(labels, 100)
    # The root of frequencies, so that even ones over a hundred labels can be seen.
    image = axes.imshow(
        np.add.reduceat(columns, rows, axis=1).T,
        aspect="auto",
        cmap="Blues",
        norm=PowerNorm(0.5, 0, 1),
        extent=(0, participants, len(rows) - 0.5, -0.5),
    )
    _dress(axes, "participants, sorted by their most frequent label", "label")
    axes.grid(False)
    _name_ticks(axes.yaxis, [names[row] for row in rows])
    bar = axes.figure.colorbar(
        image, ax=axes, pad=0.02, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1], label="frequency"
    )
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    bar.outline.set_visible(False)


def _stretches(number: int, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where ``number`` things begin in at most ``most`` even stretches, and how many each has."""
    stretches = min(number, most)
    begins = np.arange(stretches) * number // stretches
    return begins, np.diff(begins, append=number)


def _colours(number: int) -> NDArray[np.float64]:
    """Colours of labels [number, 4]: far apart where they are few, and a scale where not."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba_array

    if number <= len(COLOURS):
        return to_rgba_array(COLOURS[:number])
    return colormaps["turbo"](np.linspace(0.02, 0.98, number))


def _colour_bar(axes: "Axes", colours: NDArray[np.float64], names: list[str]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    scale = ScalarMappable(Normalize(-0.5, len(names) - 0.5), ListedColormap(colours))
    bar = axes.figure.colorbar(scale, ax=axes, pad=0.02, aspect=40, label="label")
    bar.ax.invert_yaxis()
    bar.outline.set_visible(False)
    _name_ticks(bar.ax.yaxis, names)


def _name_ticks(axis: "Axis", names: list[str]) -> None:
    """Names the places 0, 1, ... of an axis, or evenly some of them where there are many."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    step = -(-len(names) // 20)
    axis.set_major_locator(FixedLocator(range(0, len(names), step)))
    axis.set_major_formatter(FixedFormatter(names[::step]))
    axis.set_tick_params(length=0)


def _dress(axes: "Axes", horizontal: str, vertical: str) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _note(axes: "Axes", text: str) -> None:
    axes.set_title(text, loc="right", fontsize=9, color="dimgray")


def _counted(statistics: PartitionStatistics) -> str:
    return f"{len(statistics.sizes):,} participants, {statistics.examples:,} examples"


def _measured(statistics: PartitionStatistics) -> list[str]:
    texts = [f"Gini coefficient of sizes {statistics.gini:.2f}"]
    if statistics.total_variation is not None:
        texts.append(f"total variation of labels {statistics.total_variation:.2f}")
    return texts
