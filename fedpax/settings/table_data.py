"""The table of users' files as configuration: the task, and the treatment of the columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from fedpax.checks import Count
from fedpax.data import load
from fedpax.data.open_client_files import OpenFiles
from fedpax.data.tables import (
    Label,
    Treatment,
    infer_label,
    infer_treatments,
    parse_treatment,
)
from fedpax.data.tables.labels import Task
from fedpax.data.tables.treatments import MAX_CATEGORIES
from fedpax.settings.client_files import FilesConfig
from fedpax.settings.function_settings import documented_by


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
