"""The columns of users' files as features and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.aggregators import Aggregator
from fedpax.checks import Count
from fedpax.console import count_of
from fedpax.data import load
from fedpax.data.tables import (
    FittedColumn,
    Label,
    TableFeatures,
    Treatment,
    infer_label,
    infer_treatments,
    parse_treatment,
)
from fedpax.data.tables.features import fit_blocks
from fedpax.data.tables.labels import Task
from fedpax.data.tables.treatments import MAX_CATEGORIES
from fedpax.errors import ArgumentError
from fedpax.path_patterns import escape_commas
from fedpax.settings.client_aggregators import AggregatorConfig, aggregator
from fedpax.settings.client_files import FilesConfig, OpenFiles, StoredColumns
from fedpax.settings.function_settings import documented_by
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


NOISY_DEVIATION = 0.1
"""With noise, the least deviation of a column as a share of half its range."""


@dataclasses.dataclass(frozen=True)
@documented_by(infer_treatments, load)
class TableConfig(FilesConfig):
    """The files of a table, and what becomes of its columns.

    Attributes:
        task: "regression" or "classification". Default None: text, booleans, and whole numbers of
            at most 20 distinct values are classes, other numbers are numbers to predict.
        columns: treatments of columns, as "NAME=KIND", "NAME=KIND:MISSING",
            "NAME=number(LOW..HIGH)", "NAME=date(2024-01-01..2024-12-31)" or "NAME=category(A|B)",
            with KIND number, date, boolean, category or left_out, and MISSING mean, false, category
            or error. NAME may have `*`. On the command line, commas or spaces separate them.
            Default (): by the rule of `fedpax.data.tables.infer_treatments`.
        category_clients: number of clients that must have a value for it to be a category of its
            own; other values share one feature.
        standardize: "federated" subtracts the mean from numbers and divides by the deviation; these
            are means over clients by the run's aggregator. "range" scales stated ranges to -1 to 1.
    """

    task: Task | None = None
    columns: tuple[str, ...] = ()
    max_categories: Count = MAX_CATEGORIES
    category_clients: Count = 1
    standardize: Literal["federated", "range"] = "federated"
    delimiter: str | None = None
    decimal_point: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges and the treatments."""
        super().__post_init__()
        for text in self.columns:
            parse_treatment(text)


class PreparedTable(NamedTuple):
    """A table as arrays, or as a source of arrays if these would take much memory."""

    # `features`, float32 `[examples, features]`, and `label`, of all examples
    examples: Mapping[str, NDArray[Any]] | EncodedTable
    labels: NDArray[Any]
    features: TableFeatures  # the function from columns to features
    label: Label
    notes: tuple[str, ...]  # lines that tell the treatment of the columns and of the label
    cautions: tuple[str, ...] = ()  # lines that tell which values are filled

    def read(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the features and labels of some examples."""
        if isinstance(self.examples, EncodedTable):
            return self.examples.take(np.flatnonzero(rows) if rows.dtype == np.bool_ else rows)
        return {name: values[rows] for name, values in self.examples.items()}


def prepare_table(
    data: TableConfig, table: OpenFiles, config: AggregatorConfig, seed: int
) -> PreparedTable:
    """Make features and labels, with means and variances over the training clients."""
    label = table_label(data, table)
    treatments = list(table_treatments(data, table))
    if label.task == "regression":  # its mean and deviation are released with all others
        treatments.append(number_label(data))
    chosen = table.training
    counts = np.bincount(table.owners[chosen])
    clients = np.flatnonzero(counts)
    combine = statistics_aggregator(config, seed, len(clients))
    fitted = fit_blocks(
        lambda: (
            (columns, np.searchsorted(clients, table.owners[rows]))
            for columns, rows in table.blocks(chosen)
        ),
        treatments,
        counts[clients],
        **combine._asdict(),
        standardize=data.standardize,
        min_clients=data.category_clients,
    )
    if label.task == "regression":
        *columns, last = fitted.columns
        fitted = TableFeatures(tuple(columns))
        label = dataclasses.replace(label, mean=last.mean, scale=last.scale)
    if not fitted.names:
        raise ArgumentError(
            f"data.files={' '.join(data.files)} has no column that is a feature, expected at least "
            f"one beside {data.label!r}. State treatments: --data.columns NAME=category."
        )
    examples, labels = encode_examples(table, fitted, label)
    notes = _describe(treatments, fitted, label)
    new_values = fitted.describe_new_values(table.columns)
    return PreparedTable(examples, labels, fitted, label, notes, new_values)


def stated_label(data: TableConfig) -> Treatment | None:
    """Return the stated treatment of the label, or None."""
    stated = [parse_treatment(text) for text in data.columns]
    return next((t for t in stated if t.name == data.label), None)


def number_label(data: TableConfig) -> Treatment:
    """Return the treatment of a label that is a number to predict."""
    assert data.label is not None
    stated = stated_label(data)
    return Treatment(data.label, "number", "error", bounds=stated.bounds if stated else None)


def table_label(data: TableConfig, table: OpenFiles, *, min_classes: int = 2) -> Label:
    """Return the label of a table; see `infer_label`."""
    assert data.label is not None
    stated = stated_label(data)
    return infer_label(
        data.label,
        table.columns[data.label],
        data.task,
        f"{data.label}={stated.describe()}" if stated else "",
        min_classes=min_classes,
    )


def table_treatments(data: TableConfig, table: OpenFiles) -> tuple[Treatment, ...]:
    """Return the treatments of all columns but the label and the client."""
    inputs = {n: c for n, c in table.columns.items() if n not in (data.label, table.client)}
    stated = [text for text in data.columns if parse_treatment(text).name != data.label]
    return infer_treatments(inputs, stated, max_categories=data.max_categories)


def apply_saved_table(
    data: TableConfig, table: OpenFiles, saved: Mapping[str, Any]
) -> PreparedTable:
    """Make features and labels with the columns that a run saved when it began."""
    label = Label.from_json(saved["label"])
    features = TableFeatures.from_json(saved["columns"])
    for column in features.columns:
        if (name := column.treatment.name) not in {*table.columns}:
            raise ArgumentError(
                f"data.files={' '.join(data.files)} has no column {name!r}, which the model was "
                "trained with. Add it, or set --data.optional_columns "
                f"'{escape_commas(name)}': its values are then missing."
            )
    examples, labels = encode_examples(table, features, label)
    notes = _describe([], features, label)
    return PreparedTable(
        examples, labels, features, label, notes, features.describe_new_values(table.columns)
    )


def _describe(
    treatments: Sequence[Treatment], features: TableFeatures, label: Label
) -> tuple[str, ...]:
    """Return lines on the columns and the label."""
    lines = [label.describe()]
    kinds = {
        kind: [column for column in features.columns if column.treatment.kind == kind]
        for kind in ("number", "date", "boolean", "category")
    }
    counts = ", ".join(f"{len(columns)} {kind}" for kind, columns in kinds.items() if columns)
    lines.append(f"{count_of(len(features.names), 'feature')} of columns: {counts}")
    if left_out := [t for t in treatments if t.kind == "left_out"]:
        lines.append("left out: " + _list(f"{t.name!r} ({t.reason})" for t in left_out))
    if missing := [column for column in features.columns if column.has_missing]:
        lines.append("with missing values: " + _list(map(_missing, missing)))
    return tuple(lines)


def needs_statistics(data: TableConfig, features: TableFeatures, label: Label) -> bool:
    """Return whether clients send averages of numbers before the first round."""
    kinds = {column.treatment.kind for column in features.columns}
    has_numbers = not kinds.isdisjoint(("number", "date")) or label.task == "regression"
    return data.standardize == "federated" and has_numbers


def describe_disclosures(
    data: TableConfig, features: TableFeatures, label: Label
) -> tuple[str, ...]:
    """Return lines on what clients of a private run tell of their columns, and how to state it."""
    lines = []
    if needs_statistics(data, features, label):
        lines.append("the means and variances are one more private release, which epsilon counts")
    treatments = [column.treatment for column in features.columns]
    of_label = stated_label(data)
    if guessed := [t for t in treatments if t.reason != "stated"]:
        lines.append(
            f"not private: the kinds of {_list(repr(t.name) for t in guessed)}, which follow from "
            f"values; state them: --data.columns '{guessed[0].name}={guessed[0].kind}'"
        )
    if of_label is None and data.task is None:
        lines.append(
            f"not private: whether {label.name!r} is a class or a number, which follows from "
            f"values; state it: --data.task={label.task}"
        )
    open_ = [t.name for t in treatments if t.kind == "category" and not t.values]
    if label.classes and (of_label is None or of_label.values is None):
        open_.append(label.name)
    if open_ := sorted(open_):
        lines.append(
            f"not private: the set of values of {_list(map(repr, open_))}, which clients disclose; "
            f"state it: --data.columns '{open_[0]}=category(A|B)'"
        )
    if optional := [c for c in features.columns if c.treatment.missing != "error"]:
        having = [c.treatment.name for c in optional if c.has_missing]
        first, shown = optional[0].treatment, f"{len(having) or 'none'} of {len(optional)}"
        shown += f": {_list(map(repr, having))}" if having else ""
        lines.append(
            f"not private: which columns have missing values ({shown}), which clients disclose; to "
            "disclose none, fill in all values, and state --data.columns "
            f"'{first.name}={first._replace(missing='error').describe()}'"
        )
    return tuple(lines)


def _missing(column: FittedColumn) -> str:
    return f"{column.treatment.name!r} ({column.treatment.missing})"


def _list(texts: Any) -> str:
    shown = list(texts)
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")


class StatisticsAggregator(NamedTuple):
    """The aggregator of means and variances, as arguments of `fit_features`."""

    aggregator: Aggregator
    # `number of entries -> largest absolute value of an entry`, or None if the aggregator limits no
    # update
    limit: Callable[[int], float] | None = None
    least_deviation: float = 0.0  # the least deviation of a column as a share of half its range


def statistics_aggregator(
    config: AggregatorConfig, seed: int, num_clients: int
) -> StatisticsAggregator:
    """Return the aggregator of means and variances of a run.

    It is the aggregator of the run: private, secure or robust. Two differ: one that compresses is
    replaced by the mean, because these are few numbers, sent once. A clipping norm that follows a
    quantile stays at its first value.
    """
    settings: Any = config
    fields = {field.name for field in dataclasses.fields(config)}
    if {"codec", "num_levels"} & fields:
        settings = aggregator("mean")
    elif "quantile" in fields and settings.quantile is not None:
        settings = dataclasses.replace(settings, quantile=None)
    settings.check_cohort(num_clients)
    made = settings.make((seed + 0x5EED5) % 2**31, num_clients)
    if "max_norm" in fields:
        least = NOISY_DEVIATION if getattr(settings, "noise_multiplier", 0) else 0.0
        return StatisticsAggregator(made, lambda n: settings.max_norm / n**0.5, least)
    if "max_value" in fields:
        return StatisticsAggregator(made, lambda n: settings.max_value)
    return StatisticsAggregator(made)
