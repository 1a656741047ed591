"""Features of a table: standardized numbers, and one feature for each category."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Float64, Int

from fedpax.aggregators import Aggregator
from fedpax.console import count_of
from fedpax.data.tables.fitted_column import (
    CategoryValues,
    FittedColumn,
    bounded_numbers,
    checked_missing,
    count_beyond,
    count_unknown,
)
from fedpax.data.tables.moments import Moments, moments_of_blocks, moments_of_ranges
from fedpax.data.tables.treatments import Treatment, with_tuples
from fedpax.data.tables.values import (
    arrow_column,
    arrow_pieces,
    is_missing,
)
from fedpax.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class TableFeatures:
    """The function from the columns of a table to features; made by `fit_features`.

    Attributes:
        columns: the columns that have features, in order.
    """

    columns: tuple[FittedColumn, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features, in order."""
        return tuple(name for column in self.columns for name in column.features)

    def __call__(self, table: Mapping[str, Any]) -> Float32[np.ndarray, "examples features"]:
        """Return the features of some examples from their columns by name.

        Values of an absent column are missing. A missing value has its own feature if training
        clients missed values of the column. Else it is filled: a number by the mean, a boolean by
        false, and a category by 0 in all of its features. The log counts values that are filled, or
        clipped to a stated range.

        Raises:
            ValueError: a value is missing and its treatment is "error", or a number is too large.
        """
        for line in self.describe_new_values(table):
            logging.getLogger(__name__).warning(line)
        return self.encode(table)

    def encode(self, table: Mapping[str, Any]) -> Float32[np.ndarray, "examples features"]:
        """Return the features of some examples, without a line on those that are filled."""
        size = len(next(iter(table.values())))
        absent = [None] * size
        encoded = [c.encode(table.get(c.treatment.name, absent)) for c in self.columns]
        return np.concatenate(encoded, axis=1) if encoded else np.zeros((size, 0), np.float32)

    def describe_new_values(self, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Describe how many values are clipped, or have no feature: no training client has them."""
        filled, unknown, clipped, names = [], [], [], {*table}
        size = len(next(iter(table.values())))
        for column in self.columns:
            name = column.treatment.name
            pieces = arrow_pieces(table[name] if name in names else [None] * size)
            if not column.has_missing and column.treatment.missing != "error":
                count = sum(int(is_missing(x).sum()) for x in pieces)
                filled += [f"{count:,} of {name!r} become {column.fill}"] * bool(count)
            if count := count_beyond(column.treatment, pieces):
                clipped.append(f"{count:,} of {size:,} of {name!r}")
            if column.treatment.kind == "category" and not column.has_other:
                count, first = count_unknown(column.categories, pieces)
                unknown += [f"{count:,} of {name!r}, such as {first!r}"] * bool(count)
        lines = (
            ("missing values, of which training has none: ", filled),
            ("categories that training does not have, and that have no feature: ", unknown),
            ("values beyond the stated ranges, clipped to them: ", clipped),
        )
        return tuple(start + _first_of(columns) for start, columns in lines if columns)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the columns as JSON values, from which `from_json` makes an equal object."""
        return [
            {
                **dataclasses.asdict(column),
                "treatment": column.treatment._asdict(),
                "features": column.features,
            }
            for column in self.columns
        ]

    @classmethod
    def from_json(cls, columns: Sequence[Mapping[str, Any]]) -> TableFeatures:
        """Make the features from the values of `to_json`."""
        fitted = []
        for column in columns:
            fields = with_tuples(column) | {"treatment": Treatment.from_json(column["treatment"])}
            del fields["features"]
            fitted.append(FittedColumn(**fields))
        return cls(tuple(fitted))


def _first_of(columns: Sequence[str]) -> str:
    most = 10
    more = [f"and those of {count_of(len(columns) - most, 'more column')}"]
    return ", ".join([*columns[:most], *more * (len(columns) > most)])


def fit_features(
    table: Mapping[str, Any],
    treatments: Sequence[Treatment],
    clients: Int[np.ndarray, " examples"],
    num_clients: int,
    *,
    aggregator: Aggregator | None = None,
    limit: Callable[[int], float] | None = None,
    least_deviation: float = 0.0,
    standardize: Literal["federated", "range"] = "federated",
    min_clients: int = 1,
) -> TableFeatures:
    """Fit the features of a table to its training clients.

    Numbers and dates become (x - mean) / deviation with the mean and variance of
    `federated_moments`. Booleans become 0 and 1. A category becomes one feature for each of its
    values, 1 or 0.

    Beside the moments, clients disclose, without differential privacy, the values of each category
    that are not stated, and whether they miss a value of a column.

    Args:
        table: the columns of the training examples by name.
        treatments: the treatments, from `fedpax.data.tables.infer_treatments`.
        clients: the client of each example, from 0.
        num_clients: number of clients.
        aggregator: combines the clients' averages. Default None: the weighted mean.
        limit: as in `federated_moments`. Numbers and dates then need bounds.
        least_deviation: as in `federated_moments`.
        standardize: "range" scales numbers and dates from their bounds to -1 and 1 instead, so that
            clients send no averages.
        min_clients: number of clients that must have a value for it to be a category. Others share
            the feature "another".

    Raises:
        ValueError: a number or date has no bounds and needs them, a value is missing and its
            treatment is "error", or a number is too large.

    Example:
        >>> from fedpax.data.tables.treatments import infer_treatments
        >>> table = {"age": [30, 50, None, 40], "sex": ["f", "m", "m", "f"]}
        >>> features = fit_features(table, infer_treatments(table), np.array([0, 0, 1, 1]), 2)
        >>> features.names
        ('age', 'age is missing', 'sex=f', 'sex=m')
        >>> np.float64(features({"age": [50], "sex": ["x"]})).round(4).tolist()
        [[1.2247, 0.0, 0.0, 0.0]]
    """
    columns = {t.name: arrow_column(table[t.name]) for t in treatments if t.kind != "left_out"}
    return fit_blocks(
        lambda: [(columns, clients)],
        treatments,
        np.bincount(clients, minlength=num_clients),
        aggregator=aggregator,
        limit=limit,
        least_deviation=least_deviation,
        standardize=standardize,
        min_clients=min_clients,
    )


def fit_blocks(
    blocks: Callable[[], Iterable[tuple[Mapping[str, Any], Int[np.ndarray, " examples"]]]],
    treatments: Sequence[Treatment],
    counts: Int[np.ndarray, " clients"],
    *,
    aggregator: Aggregator | None,
    limit: Callable[[int], float] | None,
    least_deviation: float,
    standardize: Literal["federated", "range"],
    min_clients: int,
) -> TableFeatures:
    """Fit features to a table that is read in blocks, two or three times; see `fit_features`."""
    # `blocks` returns the columns of some examples and their clients, again at each call; the
    # examples of a client follow one another. `counts` are the examples of each client in all
    # blocks.
    used = [treatment for treatment in treatments if treatment.kind != "left_out"]
    numeric = numeric_columns(used)
    bounds = numeric_bounds(numeric, needed=limit is not None or standardize == "range")
    values_of = {t.name: CategoryValues(t) for t in used if t.kind == "category"}
    missing = set()
    for table, clients in blocks():
        for treatment in used:
            column = arrow_column(table[treatment.name])
            if checked_missing(treatment, column).any():
                missing.add(treatment.name)
            if treatment.kind == "category":
                values_of[treatment.name].add(column, clients)
    if standardize == "range":
        moments = moments_of_ranges(bounds)
    else:
        moments = moments_of_blocks(
            lambda: ((numeric_values(numeric, table, len(who)), who) for table, who in blocks()),
            len(numeric),
            counts,
            aggregator,
            bounds=bounds,
            limit=limit,
            least_deviation=least_deviation,
        )
    categories = {name: values.choose(min_clients) for name, values in values_of.items()}
    return assemble_features(used, moments, categories, missing)


def numeric_columns(treatments: Sequence[Treatment]) -> list[Treatment]:
    """Return the treatments of numbers and dates, whose means and deviations are needed."""
    return [t for t in treatments if t.kind in ("number", "date")]


def numeric_bounds(
    numeric: Sequence[Treatment], *, needed: bool
) -> Float64[np.ndarray, "columns 2"] | None:
    """Return the stated ranges of columns if they are needed; raise if one is missing."""
    if not needed:
        return None
    if unbounded := [t for t in numeric if t.bounds is None]:
        first, number = unbounded[0], len(unbounded)
        counted = "1 column of numbers or dates has"
        if number > 1:
            counted = f"{number} columns of numbers or dates have"
        raise ArgumentError(
            f"{counted} no range, such as {first.name!r}, expected a range for each, because this "
            "aggregator limits what a client sends, or because of --data.standardize=range. Set "
            f"--data.columns '{first.name}={first.kind}(LOW..HIGH)', or '*=number(LOW..HIGH)' if "
            "none is text, with ranges that are known without the data."
        )
    return np.array([t.bounds for t in numeric], np.float64).reshape(-1, 2)


def numeric_values(
    numeric: Sequence[Treatment], table: Mapping[str, Any], num_examples: int
) -> Float64[np.ndarray, "examples columns"]:
    """Return the numbers and dates of a table; NaN where one is missing or a column absent."""
    absent = [None] * num_examples
    values = [bounded_numbers(t, arrow_column(table.get(t.name, absent))) for t in numeric]
    return np.stack(values).T if values else np.zeros((num_examples, 0))  # contiguous columns


def assemble_features(
    used: Sequence[Treatment],
    moments: Moments,
    categories: Mapping[str, tuple[tuple[str, ...], bool]],
    missing: Collection[str],
) -> TableFeatures:
    """Make the features from what is known of the training clients."""
    # A category has its values, and whether a client has another one. `missing` names the columns
    # of which a client misses a value.
    places = {treatment.name: place for place, treatment in enumerate(numeric_columns(used))}
    deviations = np.sqrt(moments.variance)
    fitted = []
    for treatment in used:
        name, has_missing = treatment.name, treatment.name in missing
        if treatment.kind == "category":
            values, has_other = categories[name]
            column = FittedColumn(treatment, values, has_missing=has_missing, has_other=has_other)
        elif treatment.kind == "boolean":
            column = FittedColumn(treatment, has_missing=has_missing)
        else:
            place = places[name]
            column = FittedColumn(
                treatment,
                mean=float(moments.mean[place]),
                scale=float(deviations[place]) or 1.0,
                has_missing=has_missing,
            )
        fitted.append(column)
    return TableFeatures(tuple(fitted))
