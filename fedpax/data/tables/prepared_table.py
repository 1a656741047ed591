"""Tables of clients as features and labels, in memory or encoded when they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.console import count_of, first_ten
from fedpax.data.open_client_files import OpenFiles, PreparedFiles, StoredColumns
from fedpax.data.tables.features import TableFeatures, fit_blocks
from fedpax.data.tables.fitted_column import FittedColumn
from fedpax.data.tables.labels import Label
from fedpax.data.tables.treatments import Treatment
from fedpax.errors import ArgumentError
from fedpax.sources.source import Source

IN_MEMORY = 1 << 29
"""The most bytes of features of all examples that are held in memory."""


class EncodedTable(Source):
    """Features of examples that stay where their columns are stored."""

    def __init__(
        self, columns: StoredColumns, features: TableFeatures, labels: NDArray[Any]
    ) -> None:
        super().__init__(columns.name, Path(), labels)
        self._columns, self._features, self._labels = columns, features, labels

    def __getitem__(self, index: Any) -> Any:
        return {name: values[0] for name, values in self.take([index]).items()}

    def take(self, indices: ArrayLike) -> dict[str, NDArray[Any]]:
        """Return the features and labels of some examples."""
        rows = np.asarray(indices, np.int64)
        features = np.empty((len(rows), len(self._features.names)), np.float32)
        size = self._columns.block_size()
        for k in range(0, len(rows), size):
            features[k : k + size] = self._features.encode(self._columns.read(rows[k : k + size]))
        return {"features": features, "label": self._labels[rows]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedTable(PreparedFiles):
    """The `features`, float32 `[examples, features]`, and the `label` of all examples."""

    features: TableFeatures


def fit_table(table: OpenFiles, treatments: Sequence[Treatment], **settings: Any) -> TableFeatures:
    """Fit features to the training clients of files; `fit_features` has the settings."""
    chosen = table.training
    counts = np.bincount(table.owners[chosen])
    clients = np.flatnonzero(counts)
    return fit_blocks(
        lambda: (
            (columns, np.searchsorted(clients, table.owners[rows]))
            for columns, rows in table.blocks(chosen)
        ),
        treatments,
        counts[clients],
        **settings,
    )


def split_label(features: TableFeatures, label: Label, files: str) -> tuple[TableFeatures, Label]:
    """Take a number to predict, which was fitted as the last column, out of the features."""
    if label.task == "regression":
        *columns, last = features.columns
        bounds = last.treatment.bounds
        label = dataclasses.replace(label, mean=last.mean, scale=last.scale, bounds=bounds)
        features = TableFeatures(tuple(columns))
    if not features.names:
        raise ArgumentError(
            f"{files} no column that is a feature, expected at least one beside {label.name!r}. "
            "State treatments: --data.columns NAME=category."
        )
    return features, label


def encode_table(
    table: OpenFiles, features: TableFeatures, label: Label, treatments: Sequence[Treatment] = ()
) -> PreparedTable:
    """Encode all examples; the notes tell which of the treatments leave a column out."""
    count, width = len(table.owners), len(features.names)
    dtype = np.int32 if label.task == "classification" else np.float32
    examples: Mapping[str, NDArray[Any]] | EncodedTable
    if 4 * count * width <= IN_MEMORY:
        labels, encoded = np.empty(count, dtype), np.empty((count, width), np.float32)
        for columns, rows in table.blocks(np.ones(count, np.bool_)):
            labels[rows] = label.encode(columns[label.name])
            encoded[rows] = features.encode(columns)
        examples = {"features": encoded, "label": labels}
    else:
        labels = np.asarray(label.encode(table.columns[label.name]), dtype)
        examples = EncodedTable(table.columns, features, labels)
    notes, told = _describe(treatments, features, label), features.columns
    if label.bounds is not None:  # the values beyond it are counted too
        told = *told, FittedColumn(Treatment(label.name, "number", "error", bounds=label.bounds))
    cautions = TableFeatures(told).describe_new_values(table.columns)
    return PreparedTable(examples, labels, label, notes, cautions, features=features)


def _describe(
    treatments: Sequence[Treatment], features: TableFeatures, label: Label
) -> tuple[str, ...]:
    kinds = [column.treatment.kind for column in features.columns]
    counts = [
        f"{kinds.count(kind)} {kind}"
        for kind in ("number", "date", "boolean", "category")
        if kind in kinds
    ]
    of_columns = f"{count_of(len(features.names), 'feature')} of columns: {', '.join(counts)}"
    lines = [label.describe(), of_columns]
    if left_out := [t for t in treatments if t.kind == "left_out"]:
        lines.append("left out: " + first_ten(f"{t.name!r} ({t.reason})" for t in left_out))
    if missing := [column.treatment for column in features.columns if column.has_missing]:
        lines.append(
            "with missing values: " + first_ten(f"{t.name!r} ({t.missing})" for t in missing)
        )
    return tuple(lines)
