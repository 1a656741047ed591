"""EncodedTable: a table whose examples become features when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.data.tables import Label, TableFeatures
from fedpax.experiments.client_files import OpenFiles, StoredColumns
from fedpax.sources.source import Source

IN_MEMORY = 1 << 29
"""The most bytes of features of all examples that are held in memory."""


class EncodedTable(Source):
    """Features of examples that stay where their columns are stored.

    Args:
        columns: the columns.
        features: the function from columns to features.
        labels: the labels of all examples.
    """

    def __init__(
        self, columns: StoredColumns, features: TableFeatures, labels: NDArray[Any]
    ) -> None:
        super().__init__(columns.name, Path(), labels)
        self._columns, self._features, self._labels = columns, features, labels

    def __getitem__(self, index: Any) -> Any:
        """Return the features and the label of an example."""
        return {name: values[0] for name, values in self.take([index]).items()}

    def take(self, indices: ArrayLike) -> dict[str, NDArray[Any]]:
        """Return the features and labels of some examples."""
        rows = np.asarray(indices, np.int64)
        features = np.empty((len(rows), len(self._features.names)), np.float32)
        size = self._columns.block_size()
        for k in range(0, len(rows), size):
            features[k : k + size] = self._features.encode(self._columns.read(rows[k : k + size]))
        return {"features": features, "label": self._labels[rows]}


def encode_examples(
    table: OpenFiles, features: TableFeatures, label: Label
) -> tuple[Mapping[str, NDArray[Any]] | EncodedTable, NDArray[Any]]:
    """Return the features and labels of all examples, and the labels."""
    count, width = len(table.owners), len(features.names)
    dtype = np.int32 if label.task == "classification" else np.float32
    if 4 * count * width <= IN_MEMORY:
        labels, encoded = np.empty(count, dtype), np.empty((count, width), np.float32)
        for columns, rows in table.blocks(np.ones(count, np.bool_)):
            labels[rows] = label.encode(columns[label.name])
            encoded[rows] = features.encode(columns)
        return {"features": encoded, "label": labels}, labels
    labels = np.asarray(label.encode(table.columns[label.name]), dtype)
    return EncodedTable(table.columns, features, labels), labels
