"""Measures of partitions."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from fedpax.errors import ArgumentError
from fedpax.populations.client_arrays import RaggedPartition
from fedpax.populations.partition import Partition, check_sized, index_labels
from fedpax.primitives.casts import checked_cast


class PartitionStatistics(NamedTuple):
    """Measures of a partition; `str` gives a table.

    Fields about labels are None without labels, and exclude participants without examples. Means
    weigh participants equally.

    Attributes:
        num_examples: the number of examples of all participants together.
        sizes: the number of examples of each participant.
        smallest: the minimum of the sizes.
        median: the median of the sizes.
        mean: the mean of the sizes.
        largest: the maximum of the sizes.
        coefficient_of_variation: the standard deviation of the sizes divided by their mean.
        gini: the Gini coefficient of the sizes: 0 if all are equal.
        classes: the labels that occur, ascending.
        label_counts: the number of examples of each label, by participant.
        labels_per_participant: the mean number of different labels of a participant.
        label_entropy: the mean entropy of a participant's label distribution, in nats.
        overall_entropy: the entropy of the label distribution of all examples, in nats.
        total_variation: the mean total variation distance between a participant's label
            distribution and the one of all examples, 0 to 1.
    """

    num_examples: int
    sizes: Int64[np.ndarray, " participants"]
    smallest: int
    median: float
    mean: float
    largest: int
    coefficient_of_variation: float
    gini: float
    classes: Int64[np.ndarray, " classes"] | None = None
    label_counts: Int64[np.ndarray, "participants classes"] | None = None
    labels_per_participant: float | None = None
    label_entropy: float | None = None
    overall_entropy: float | None = None
    total_variation: float | None = None

    def __str__(self) -> str:
        rows = [
            ("partition", "value"),
            ("participants", f"{len(self.sizes):,}"),
            ("examples", f"{self.num_examples:,}"),
            ("smallest participant", f"{self.smallest:,}"),
            ("median participant", f"{self.median:,.1f}"),
            ("mean participant", f"{self.mean:,.1f}"),
            ("largest participant", f"{self.largest:,}"),
            ("coefficient of variation", f"{self.coefficient_of_variation:.3f}"),
            ("Gini coefficient", f"{self.gini:.3f}"),
        ]
        if self.classes is not None:
            rows += [
                ("labels", f"{len(self.classes):,}"),
                ("labels per participant", f"{self.labels_per_participant:,.1f}"),
                ("entropy per participant", f"{self.label_entropy:.3f} nats"),
                ("entropy of all examples", f"{self.overall_entropy:.3f} nats"),
                ("total variation distance", f"{self.total_variation:.3f}"),
            ]
        left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
        lines = [f"| {name:{left}} | {value:>{right}} |" for name, value in rows]
        lines.insert(1, f"|{'-' * (left + 2)}|{'-' * (right + 2)}|")
        return "\n".join(lines)


def partition_statistics(
    partition: Partition, labels: ArrayLike | Iterable[int] | None = None
) -> PartitionStatistics:
    """Measure how participants differ in the amounts and labels of their examples.

    For a baseline, measure `partition_iid`.

    Args:
        partition: for each participant the indices of its examples.
        labels: integers `[examples]`, one for each example of the source. Default None: measure
            sizes alone.

    Returns:
        The measures; `print` shows them as a table.

    Raises:
        ValueError: no participant has an example, `labels` is not integers `[examples]`, or an
            index has no label.

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
        | labels per participant   |        1.5 |
        | entropy per participant  | 0.318 nats |
        | entropy of all examples  | 0.693 nats |
        | total variation distance |      0.333 |
    """
    check_sized(partition, "partition")
    if isinstance(partition, RaggedPartition):
        sizes = partition.sizes()
    else:
        sizes = np.array([len(indices) for indices in partition], np.int64)
    num_participants, num_examples = len(sizes), int(sizes.sum())
    if not num_examples:
        raise ArgumentError("The partition has no examples: assign at least one.")
    # Half the mean absolute difference of two participants, divided by the mean.
    coefficients = 2 * np.arange(1, num_participants + 1) - num_participants - 1
    gini = float(coefficients @ np.sort(sizes)) / (num_participants * num_examples)
    statistics = PartitionStatistics(
        num_examples=num_examples,
        sizes=sizes,
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        mean=float(sizes.mean()),
        largest=int(sizes.max()),
        coefficient_of_variation=float(sizes.std() / sizes.mean()),
        gini=gini,
    )
    if labels is None:
        return statistics
    all_classes, class_index = index_labels(labels)
    if isinstance(partition, RaggedPartition):
        indices = partition.indices
    else:
        indices = np.concatenate(
            [checked_cast(part, np.int64, "The partition", "Give indices.") for part in partition]
        )
    if indices.min() < 0 or indices.max() >= len(class_index):
        outside = indices.min() if indices.min() < 0 else indices.max()
        raise ArgumentError(
            f"The partition has index {outside}, but there are {len(class_index)} labels: give the "
            "labels of the source that it was made for, one for each example."
        )
    owner = np.repeat(np.arange(num_participants), sizes)
    cells = owner * len(all_classes) + class_index[indices]
    shape = num_participants, len(all_classes)
    counts = np.bincount(cells, minlength=math.prod(shape)).reshape(shape)
    occurs = counts.any(axis=0)
    counts = counts[:, occurs]
    frequencies = counts[sizes > 0] / sizes[sizes > 0, None]
    overall = counts.sum(axis=0) / num_examples
    return statistics._replace(
        classes=all_classes[occurs],
        label_counts=counts,
        labels_per_participant=float((frequencies > 0).sum(axis=1).mean()),
        label_entropy=float(_entropy(frequencies).mean()),
        overall_entropy=float(_entropy(overall)),
        total_variation=float(np.abs(frequencies - overall).sum(axis=1).mean() / 2),
    )


def _entropy(frequencies: Float64[np.ndarray, "*batch classes"]) -> Float64[np.ndarray, "*batch"]:
    """Return the entropy in nats over the last axis."""
    logs = np.log(frequencies, where=frequencies > 0, out=np.zeros_like(frequencies))
    return -(frequencies * logs).sum(axis=-1)
