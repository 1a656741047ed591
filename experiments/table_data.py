"""The table of an experiment: its files as features and labels, in training and held-out parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from fedpax.aggregators import Aggregator
from fedpax.checks import COUNT, DECAY, check_ranges
from fedpax.data import load
from fedpax.data.tables import (
    FittedColumn,
    Label,
    TableFeatures,
    Treatment,
    fit_features,
    infer_label,
    infer_treatments,
    parse_treatment,
)
from fedpax.data.tables.columns import MAX_CATEGORIES
from fedpax.data.tables.labels import Task, missing_label_message
from fedpax.data.tables.values import arrow_column, is_missing
from fedpax.errors import ArgumentError
from fedpax.experiments.client_aggregators import AggregatorConfig, aggregator

NOISY_DEVIATION = 0.1
"""With noise, the least deviation of a column as a share of half its range."""


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """The files of a table, and what becomes of its columns.

    Attributes:
        files: paths and patterns, as for `fedpax.data.load`, such as "hospitals/*.csv". With
            `{split}` in the path, the split "train" is trained on.
        client: the column that names an example's client. Default None: `{client}` in the path, or
            each file is a client.
        label: the column to predict.
        task: "regression" or "classification". Default None: text, booleans, and whole numbers of
            at most 20 distinct values are classes, other numbers are numbers to predict.
        columns: treatments of columns, as "NAME=KIND", "NAME=KIND:MISSING",
            "NAME=number(LOW..HIGH)" or "NAME=category(A|B)", with KIND number, date, boolean,
            category or left_out, and MISSING mean, category or error. NAME may have `*`. Default
            (): by the rule of `fedpax.data.tables.infer_treatments`.
        max_categories: the largest number of distinct values of text that is a category.
        category_clients: number of clients that must have a value for it to be a category of its
            own; other values share one feature.
        standardize: "federated" subtracts the mean from numbers and divides by the deviation; these
            are means over clients by the run's aggregator. "range" scales stated ranges to -1 to 1.
        missing_label: what examples without a label are: an "error", or left out, "skip".
        heldout_fraction: share of each client's examples that is held out, chosen by a hash of the
            example.
        heldout_clients: share of the clients that are held out with all their examples, chosen by a
            hash of the name.
        heldout_split: the split to evaluate on if `files` has `{split}`; `heldout_fraction` then
            has no effect.
        optional_columns: columns that some of the files lack; their values are missing there.
        delimiter: the character between columns of CSV. Default None: a comma, in TSV a tab.
    """

    files: tuple[str, ...] = ()
    client: str | None = None
    label: str | None = None
    task: Task | None = None
    columns: tuple[str, ...] = ()
    max_categories: int = MAX_CATEGORIES
    category_clients: int = 1
    standardize: Literal["federated", "range"] = "federated"
    missing_label: Literal["error", "skip"] = "error"
    heldout_fraction: float = 0.2
    heldout_clients: float = 0.0
    heldout_split: str = "test"
    optional_columns: tuple[str, ...] = ()
    delimiter: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges and the treatments."""
        check_ranges(self, "data", max_categories=COUNT, category_clients=COUNT)
        check_ranges(self, "data", heldout_fraction=DECAY, heldout_clients=DECAY)
        for text in self.columns:
            parse_treatment(text)


class OpenTable(NamedTuple):
    """The files of a table, and the part of each example.

    Attributes:
        columns: all columns by name, Arrow arrays, sorted by client.
        client: the column of clients.
        names: the clients' names.
        owners: the client of each example.
        heldout: whether an example of a training client is held out.
        is_new: whether a client is held out with all its examples.
        notes: lines that tell what was read.
    """

    columns: Mapping[str, Any]
    client: str
    names: Sequence[str]
    owners: Int[np.ndarray, " examples"]
    heldout: Bool[np.ndarray, " examples"]
    is_new: Bool[np.ndarray, " clients"]
    notes: tuple[str, ...]

    @property
    def training(self) -> Bool[np.ndarray, " examples"]:
        """Whether an example is trained on."""
        return np.asarray(~self.heldout & ~self.is_new[self.owners], np.bool_)

    def parts(self, chosen: Bool[np.ndarray, " examples"]) -> dict[str, NDArray[np.int64]]:
        """Return the chosen examples of each client that has any, by its name."""
        rows = np.flatnonzero(chosen)
        owners = self.owners[rows]
        ends = np.searchsorted(owners, np.arange(len(self.names) + 1))
        return {
            name: rows[begin:end]
            for name, begin, end in zip(self.names, ends, ends[1:], strict=False)
            if end > begin
        }


def open_table(data: TableConfig) -> OpenTable:
    """Read the files of a table, and decide which examples are held out.

    Args:
        data: the table.

    Raises:
        ValueError: there are no files, no label, no clients, or no held-out examples; or a label is
            missing.
    """
    if not data.files or data.label is None:
        raise ArgumentError(
            f"data.files={data.files} and data.label={data.label}, expected files and the column "
            "to predict. Set for example --data.files='hospitals/*.csv' --data.label=outcome."
        )
    has_split = any("{split}" in file for file in data.files)
    splits = ["train", data.heldout_split] if has_split else [None]
    sources: list[Any] = [
        load(
            data.files,
            split,
            client=data.client,
            label=data.label,
            optional_columns=data.optional_columns,
            delimiter=data.delimiter,
        )
        for split in splits
    ]
    if (client := sources[0].client) is None:
        raise ArgumentError(
            f"data.files={' '.join(data.files)} is one file without clients, expected the column "
            "that names an example's client. Set --data.client to one of "
            f"{', '.join(map(repr, sources[0].fields))}."
        )
    table, of_heldout = _join(sources)
    skipped = is_missing(arrow_column(table.column(data.label)))
    if skipped.any():
        if data.missing_label == "error":
            raise ArgumentError(missing_label_message(data.label, skipped))
        table, of_heldout = table.filter(~skipped), of_heldout[~skipped]
    found = table.column(client).combine_chunks().dictionary_encode()
    names = [str(name) for name in found.dictionary.to_pylist()]
    owners = np.asarray(found.indices.to_numpy(), np.int64)
    # Sorted by client again: the held-out split followed the training split.
    order = np.argsort(owners, kind="stable")
    table, owners, of_heldout = table.take(order), owners[order], of_heldout[order]
    heldout, is_new = _held_out(data, table, client, names, owners, of_heldout, has_split)
    parts = [f"{int(heldout.sum()):,} held out within clients"]
    if is_new.any():
        new = f"{int(is_new.sum()):,} held-out clients"
        parts.append(f"{int(is_new[owners].sum()):,} of {new}")
    notes = [f"{len(names):,} clients, {len(owners):,} examples: {', '.join(parts)}"]
    if skipped.any():
        notes.append(f"left out: {int(skipped.sum()):,} examples without {data.label!r}")
    return OpenTable(
        dict(zip(table.column_names, table.columns, strict=True)),
        client,
        names,
        owners,
        heldout,
        is_new,
        tuple(notes),
    )


def _join(sources: Sequence[Any]) -> tuple[Any, Bool[np.ndarray, " examples"]]:
    """Concatenate the tables of the splits, and tell the examples of the second one."""
    import pyarrow as pa

    tables = [source.table for source in sources]
    of_heldout = np.repeat(np.arange(len(tables)) == 1, [table.num_rows for table in tables])
    if len(tables) == 1:
        return tables[0], of_heldout
    return pa.concat_tables(tables, promote_options="permissive"), of_heldout


def _held_out(
    data: TableConfig,
    table: Any,
    client: str,
    names: Sequence[str],
    owners: Int[np.ndarray, " examples"],
    of_heldout: Bool[np.ndarray, " examples"],
    has_split: bool,
) -> tuple[Bool[np.ndarray, " examples"], Bool[np.ndarray, " clients"]]:
    """Return which examples of training clients, and which clients, are held out."""
    from fedpax.data.files.held_out import held_out

    chosen = of_heldout if has_split else held_out(table, data.heldout_fraction)
    of_clients = held_out(table.select([client]), data.heldout_clients)
    is_new = np.zeros(len(names), np.bool_)
    is_new[owners[of_clients]] = True
    if is_new.all():
        raise ArgumentError(
            f"data.heldout_clients={data.heldout_clients} holds out all {len(names)} clients, "
            "expected some to train on. Set a smaller --data.heldout_clients."
        )
    heldout = chosen & ~is_new[owners]
    if not heldout.any() and not is_new.any():
        raise ArgumentError(
            f"data.heldout_fraction={data.heldout_fraction} holds out none of {len(owners)} "
            "examples, expected some to evaluate on. Set a larger --data.heldout_fraction or "
            "--data.heldout_clients."
        )
    return heldout, is_new


class PreparedTable(NamedTuple):
    """A table as arrays.

    Attributes:
        examples: `features`, float32 `[examples, features]`, and `label`, of all examples.
        features: the function from columns to features.
        label: the label.
        notes: lines that tell the treatment of the columns and of the label.
    """

    examples: Mapping[str, NDArray[Any]]
    features: TableFeatures
    label: Label
    notes: tuple[str, ...]


def prepare_table(
    data: TableConfig, table: OpenTable, config: AggregatorConfig, seed: int
) -> PreparedTable:
    """Make features and labels, with means and variances over the training clients.

    Args:
        data: the settings.
        table: the columns.
        config: the aggregator of the run.
        seed: random seed of the run.
    """
    assert data.label is not None
    stated = [parse_treatment(text) for text in data.columns]
    of_label = next((t for t in stated if t.name == data.label), None)
    label = infer_label(
        data.label,
        table.columns[data.label],
        data.task,
        f"{data.label}={of_label.describe()}" if of_label else "",
    )
    inputs = {n: c for n, c in table.columns.items() if n not in (data.label, table.client)}
    others = [text for text in data.columns if parse_treatment(text).name != data.label]
    treatments = list(infer_treatments(inputs, others, max_categories=data.max_categories))
    if label.task == "regression":  # its mean and deviation are released with all others
        bounds = of_label.bounds if of_label else None
        treatments.append(Treatment(data.label, "number", "error", bounds=bounds))
    chosen = table.training
    _, owners = np.unique(table.owners[chosen], return_inverse=True)
    num_clients = int(owners.max()) + 1
    combine = statistics_aggregator(config, seed, num_clients)
    training = {name: column.filter(chosen) for name, column in table.columns.items()}
    fitted = fit_features(
        training,
        treatments,
        owners,
        num_clients,
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
    examples = {
        "features": fitted(table.columns),
        "label": label.encode(table.columns[data.label]),
    }
    notes = _describe(treatments, fitted, label)
    if combine.least_deviation:
        notes += _disclosures(data, fitted, label, of_label)
    return PreparedTable(examples, fitted, label, notes)


def _describe(
    treatments: Sequence[Treatment], features: TableFeatures, label: Label
) -> tuple[str, ...]:
    """Return lines on the columns and the label."""
    if label.task == "regression":
        text = f"regression (mean {label.mean:.6g}, deviation {label.scale:.6g})"
    else:
        text = f"classification, {', '.join(label.classes[:10])}"
        text += ", ..." if len(label.classes) > 10 else ""
    lines = [f"label {label.name!r}: {text}; {label.reason}"]
    kinds = {
        kind: [column for column in features.columns if column.treatment.kind == kind]
        for kind in ("number", "date", "boolean", "category")
    }
    counts = ", ".join(f"{len(columns)} {kind}" for kind, columns in kinds.items() if columns)
    lines.append(f"{len(features.names)} features of columns: {counts}")
    if left_out := [t for t in treatments if t.kind == "left_out"]:
        lines.append("left out: " + _list(f"{t.name!r} ({t.reason})" for t in left_out))
    if missing := [column for column in features.columns if column.has_missing]:
        lines.append("with missing values: " + _list(map(_missing, missing)))
    return tuple(lines)


def _disclosures(
    data: TableConfig, features: TableFeatures, label: Label, of_label: Treatment | None
) -> tuple[str, ...]:
    """Return lines on what the noise of a private run does not cover, and what it costs."""
    lines = []
    if data.standardize == "federated":
        lines.append("the means and variances are one more private release: count rounds + 1")
    stated = {column.treatment.name for column in features.columns if column.treatment.values}
    kinds = {column.treatment.name for column in features.columns if column.categories}
    if label.classes and (of_label is None or of_label.values is None):
        kinds.add(label.name)
    if open_ := sorted(kinds - stated):
        lines.append(
            f"not private: the set of values of {_list(map(repr, open_))}, which clients disclose; "
            f"state it: --data.columns '{open_[0]}=category(A|B)'"
        )
    return tuple(lines)


def _missing(column: FittedColumn) -> str:
    return f"{column.treatment.name!r} ({column.treatment.missing})"


def _list(texts: Any) -> str:
    found = list(texts)
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")


class StatisticsAggregator(NamedTuple):
    """The aggregator of means and variances, as arguments of `fit_features`.

    Attributes:
        aggregator: the aggregator.
        limit: `number of entries -> largest absolute value of an entry`, or None if the aggregator
            limits no update.
        least_deviation: the least deviation of a column as a share of half its range.
    """

    aggregator: Aggregator
    limit: Callable[[int], float] | None = None
    least_deviation: float = 0.0


def statistics_aggregator(
    config: AggregatorConfig, seed: int, num_clients: int
) -> StatisticsAggregator:
    """Return the aggregator of means and variances of a run.

    It is the aggregator of the run: private, secure or robust. Two differ: one that compresses is
    replaced by the mean, because these are few numbers, sent once. A clipping norm that follows a
    quantile stays at its first value.

    Args:
        config: the aggregator of the run.
        seed: random seed of the run; that of the statistics is another one.
        num_clients: number of clients that take part, all of them.

    Example:
        >>> statistics_aggregator(aggregator("private_mean", max_norm=2.0), 0, 5).limit(4)
        1.0
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
