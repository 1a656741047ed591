"""Users' files as configuration: clients, labels, what is held out, and the columns of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from fedpax.checks import CheckedConfig, Count, Decay
from fedpax.data import load
from fedpax.data.open_client_files import OpenFiles, open_client_files
from fedpax.data.tables import (
    Label,
    Treatment,
    infer_label,
    infer_treatments,
    parse_treatment,
)
from fedpax.data.tables.labels import Task
from fedpax.data.tables.treatments import MAX_CATEGORIES
from fedpax.errors import ArgumentError
from fedpax.settings.function_settings import documented_by
from fedpax.user_files.formats import LoadOptions, parse_types


@dataclasses.dataclass(frozen=True)
class FilesConfig(CheckedConfig):
    """Files whose examples have clients and labels.

    Attributes:
        files: paths and patterns, as for `fedpax.data.load`, such as "hospitals/*.csv". With
            `{split}` in the path, the split "train" is trained on.
        client: the column that names an example's client. Default None: `{client}` in the path, or
            each file is a client.
        partition: clients for files that have none, such as "dirichlet:0.3:100", as for
            `fedpax.data.load`.
        label: the column to predict.
        missing_label: what examples without a label are: an "error", or left out, "skip".
        heldout_fraction: share of each client's examples that is held out, chosen by a hash of the
            example.
        heldout_clients: share of the clients that are held out with all their examples, chosen by a
            hash of the name.
        heldout_split: the split to evaluate on if `files` has `{split}`; `heldout_fraction` then
            has no effect.
        optional_columns: columns that some of the files lack; their values are missing there. On
            the command line, commas or spaces separate them, and a comma in a name follows a
            backslash.
        types: types of Arrow for columns of files, as "COLUMN=TYPE", such as "zip=string", where
            the type that is found is not the intended one, separated as `optional_columns` are.
    """

    group = "data"
    files: tuple[str, ...] = ()
    client: str | None = None
    partition: str | None = None
    label: str | None = None
    missing_label: Literal["error", "skip"] = "error"
    heldout_fraction: Decay = 0.2
    heldout_clients: Decay = 0.0
    heldout_split: str = "test"
    optional_columns: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges and the types."""
        super().__post_init__()
        parse_types("--data.types", self.types)

    @property
    def has_split(self) -> bool:
        """Whether the path of a file has `{split}`."""
        return any("{split}" in file for file in self.files)

    def open(self, one_client: str | None = None) -> OpenFiles:
        """Read the files, and decide which examples are held out."""
        # `one_client` is the name of the client of one file that has no clients.
        if not self.files or self.label is None:
            raise ArgumentError(
                f"data.files={self.files} and data.label={self.label}, expected files and the "
                "column to predict. Set for example --data.files='hospitals/*.csv' "
                "--data.label=outcome."
            )
        if self.has_split and self.partition is not None:
            raise ArgumentError(
                f"data.partition={self.partition!r} divides the examples of one split, but "
                "data.files has {split}. Name all files with *, and hold out with "
                "--data.heldout_fraction."
            )
        fields = {k: v for k, v in vars(self).items() if k not in ("heldout_fraction", "columns")}
        fields["types"] = parse_types("--data.types", self.types)
        return open_client_files(
            self.files,
            LoadOptions.of(fields),
            missing_label=self.missing_label,
            heldout_fraction=self.heldout_fraction,
            heldout_clients=self.heldout_clients,
            heldout_split=self.heldout_split if self.has_split else None,
            one_client=one_client,
        )


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

    @property
    def stated_label(self) -> Treatment | None:
        """The stated treatment of the label, or None."""
        stated = [parse_treatment(text) for text in self.columns]
        return next((t for t in stated if t.name == self.label), None)

    @property
    def number_label(self) -> Treatment:
        """The treatment of a label that is a number to predict."""
        assert self.label is not None
        stated = self.stated_label
        return Treatment(self.label, "number", "error", bounds=stated.bounds if stated else None)

    def with_label(self, treatments: Sequence[Treatment], label: Label) -> list[Treatment]:
        """Add a number to predict: its mean and deviation are released with all others."""
        return [*treatments, *[self.number_label] * (label.task == "regression")]

    def label_of(self, table: OpenFiles, *, min_classes: int = 2) -> Label:
        """Return the label of a table; see `infer_label`."""
        assert self.label is not None
        stated = self.stated_label
        return infer_label(
            self.label,
            table.columns[self.label],
            self.task,
            f"{self.label}={stated.describe()}" if stated else "",
            min_classes=min_classes,
        )

    def treatments_of(self, table: OpenFiles) -> tuple[Treatment, ...]:
        """Return the treatments of all columns of a table but the label and the client."""
        inputs = {n: c for n, c in table.columns.items() if n not in (self.label, table.client)}
        stated = [text for text in self.columns if parse_treatment(text).name != self.label]
        return infer_treatments(inputs, stated, max_categories=self.max_categories)
