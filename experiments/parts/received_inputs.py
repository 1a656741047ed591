"""What a site checks of the inputs that a coordinator sends, before it trains on them."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from fedpax.data.open_client_files import OpenFiles
from fedpax.data.tables import Label, TableFeatures
from fedpax.data.tables.fitted_column import FittedColumn
from fedpax.data.tables.treatments import Treatment
from fedpax.data.tables.values import arrow_column, is_number
from fedpax.errors import ArgumentError
from fedpax.settings.table_data import TableConfig

SMALLEST_SCALE = 1e-3
"""The least scale, in deviations at the site: a smaller one singles out examples by a value."""

Deviation = Callable[[Treatment], float]


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    """Explain errors that inputs of another form raise."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"The syncer's inputs are malformed ({type(error).__name__}: {error}), expected those "
            "of `fedpax syncer`. Use the same version of fedpax on both sides."
        ) from error


@_well_formed()
def check_inputs(
    data: TableConfig, table: OpenFiles, inputs: Any, offered: Mapping[str, Any], of: Deviation
) -> None:
    """Raise unless inputs follow from what this site tells; `offered` has the values it sent."""
    own_label, stated = data.label_of(table, min_classes=1), data.stated_label
    is_open = data.task is None and stated is None
    is_open = is_open and is_number(arrow_column(table.columns[own_label.name]).type)
    has_classes = stated is not None and stated.values is not None
    label = check_label(inputs, own_label, has_classes=has_classes, is_open=is_open)
    if label.task == "regression":
        _check_numbers(data.number_label, label.mean, label.scale, of)
    columns = TableFeatures.from_json(inputs["columns"]).columns
    own = {t.name: t for t in data.treatments_of(table)}
    names = [column.treatment.name for column in columns]
    for column in columns:
        name = column.treatment.name
        if names.count(name) > 1:
            _refuse(name, "twice", "each column once")
        if name not in own and name in table.columns:
            _refuse(name, "a feature", "no label and no client among them")
        # Without values here, or without the column, nothing depends on the treatment.
        if name in own and own[name].reason != "no values":
            _check_column(data, column, own[name], offered.get(name, {}), of)


@_well_formed()
def check_label(inputs: Any, own: Label, *, has_classes: bool, is_open: bool = False) -> Label:
    """Return the label of inputs; raise unless it is this site's, with the classes it states."""
    label = Label.from_json(inputs["label"])
    if label.name != own.name:
        _refuse(label.name, "the label", f"{own.name!r}", "--data.label")
    if label.task != own.task and not (label.task == "regression" and is_open):
        _refuse(own.name, f"a label for {label.task}", own.task)
    if has_classes and label.classes != own.classes:
        _refuse(own.name, f"classes {label.classes}", f"{own.classes}, as stated")
    return label


def _check_column(
    data: TableConfig,
    column: FittedColumn,
    own: Treatment,
    offered: Mapping[str, Any],
    of: Deviation,
) -> None:
    name, treatment = own.name, column.treatment
    if own.kind == "left_out" or treatment[1:5] != own[1:5]:
        _refuse(name, treatment.describe(), f"{own.describe()} ({own.reason})")
    if own.kind in ("number", "date"):
        _check_numbers(own, column.mean, column.scale, of)
    if own.kind != "category":
        return
    categories, most = column.categories, data.max_categories
    if own.values is not None and categories != own.values:
        _refuse(name, f"the categories {categories[:5]}", f"{own.values[:5]}, as stated")
    if own.reason != "stated" and len(categories) + column.has_other > most:
        _refuse(name, f"{len(categories)} categories", f"at most --data.max_categories={most}")
    for value, clients in offered.get("values", {}).items():
        is_rare = column.has_other and clients < data.category_clients
        if value not in categories and not is_rare:
            _refuse(name, f"no category {value!r}", "each value that this site sent")


def _check_numbers(own: Treatment, mean: float, scale: float, of: Deviation) -> None:
    low, high = own.bounds or (-math.inf, math.inf)
    slack = 1e-9 * (high - low)
    if not (math.isfinite(mean) and low - slack <= mean <= high + slack):
        _refuse(own.name, f"the mean {mean}", f"a finite one from {low:g} to {high:g}")
    least = SMALLEST_SCALE * of(own)
    if not (0 < scale < math.inf and scale >= least):
        _refuse(own.name, f"the scale {scale}", f"at least {least:g}, by the values here")


def _refuse(name: str, received: str, expected: str, flag: str = "") -> NoReturn:
    raise ArgumentError(
        f"The syncer's inputs have {name!r} as {received}, expected {expected}: other inputs could "
        "tell single values. If the difference is meant, state it at the syncer and at each site: "
        f"{flag or '--data.columns ' + repr(f'{name}=KIND')}. Else ask who runs the syncer."
    )
