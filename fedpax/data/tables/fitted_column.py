"""A column of a table as features: its treatment, and what it needs from the training clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int
from numpy.typing import NDArray

from fedpax.console import count_of
from fedpax.data.tables.treatments import Treatment, count_distinct
from fedpax.data.tables.values import (
    TextValues,
    arrow_column,
    encode_texts,
    is_date,
    is_missing,
    is_number,
    is_text,
    is_utf8,
    numbers,
    pc,
)
from fedpax.errors import ArgumentError

LARGEST = 1e18
"""The largest number of a column without a range: float32 holds its square."""


@dataclasses.dataclass(frozen=True)
class FittedColumn:
    """A column's treatment, and what it needs from the training clients.

    Attributes:
        categories: the categories in order; () for another kind.
        mean: the mean over the training clients; 0 for another kind than numbers and dates.
        scale: the standard deviation likewise, or 1 if it is 0.
        has_missing: whether a training client misses a value: there is a feature for it.
        has_other: the same for values that are no categories. Without it, such a value has 0 in all
            features of the column.
    """

    treatment: Treatment
    categories: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0
    has_missing: bool = False
    has_other: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the column's features, in order."""
        name = self.treatment.name
        if self.treatment.kind == "category":
            names = [f"{name}={value}" for value in self.categories]
            names += [f"{name} is another"] * self.has_other
        else:
            names = [name]
        return tuple(names + [f"{name} is missing"] * self.has_missing)

    @property
    def fill(self) -> str:
        """Describe the value that fills a missing one where no training client misses one."""
        fills = {"boolean": "false", "category": "no category"}
        return fills.get(self.treatment.kind, f"the mean {self.mean:.6g}")

    def encode(self, values: Any) -> Float32[np.ndarray, "examples features"]:
        """Return the features of some examples from the column's values.

        Raises:
            ValueError: a value is missing and the treatment is "error", a number is too large, or
                a boolean is neither true nor false.
        """
        column = arrow_column(values)
        missing = checked_missing(self.treatment, column)
        if self.treatment.kind == "category":
            features = self._one_hot(*encode_texts(column))
        elif self.treatment.kind == "boolean":
            features = [np.where(missing, 0, _booleans(self.treatment.name, column))]
        else:
            x = bounded_numbers(self.treatment, column)
            features = [np.where(missing, 0, (x - self.mean) / self.scale)]
        if self.has_missing:
            features = [*features, missing]
        if not features:
            return np.zeros((len(column), 0), np.float32)
        return np.stack(features, axis=1).astype(np.float32)

    def _one_hot(
        self, distinct: Sequence[str], codes: Int[np.ndarray, " examples"]
    ) -> list[NDArray[Any]]:
        places = {value: place for place, value in enumerate(self.categories)}
        # The last entry is for missing values, whose code is -1.
        place = np.array([*(places.get(value, -1) for value in distinct), -1], np.int64)[codes]
        known = [place == k for k in range(len(self.categories))]
        if not self.has_other:
            return known
        return [*known, (place < 0) & (codes >= 0)]


def count_unknown(categories: Sequence[str], pieces: Sequence[Any]) -> tuple[int, str | None]:
    """Count the values of a column that are none of its categories, and return the first one."""
    count, first, known = 0, None, {*categories}
    for piece in pieces:
        distinct, codes = encode_texts(piece)
        is_unknown = np.array([*(value not in known for value in distinct), False])[codes]
        if number := int(is_unknown.sum()):
            first = first or distinct[codes[np.argmax(is_unknown)]]
            count += number
    return count, first


def count_beyond(treatment: Treatment, pieces: Sequence[Any]) -> int:
    """Count the values of a column beyond its stated range, which are clipped to it."""
    if treatment.bounds is None:
        return 0
    low, high = treatment.bounds
    values = (_checked_numbers(treatment, piece) for piece in pieces)
    return sum(int(((x < low) | (x > high)).sum()) for x in values)


def checked_missing(treatment: Treatment, column: Any) -> Bool[np.ndarray, " examples"]:
    """Return where a column has no value, or raise if its treatment is "error"."""
    missing = is_missing(column)
    if treatment.missing == "error" and missing.any():
        raise ArgumentError(
            f"The column {treatment.name!r} has no value in {int(missing.sum()):,} of "
            f"{len(missing):,} examples, the first of them example {int(np.argmax(missing))}, but "
            f"its treatment is {treatment.describe()}. Fill them in, or set --data.columns "
            f"'{treatment._replace(missing=None).describe()}'."
        )
    return missing


def bounded_numbers(treatment: Treatment, column: Any) -> Float64[np.ndarray, " examples"]:
    """Return the numbers of a column within its bounds; NaN where one is missing."""
    values = _checked_numbers(treatment, column)
    if treatment.bounds is not None:
        return np.clip(values, *treatment.bounds)
    too_large = np.abs(values) > LARGEST
    if too_large.any():
        first = int(np.argmax(too_large))
        raise ArgumentError(
            f"The column {treatment.name!r} is {values[first]:g} in example {first}, and too large "
            f"in {count_of(int(too_large.sum()), 'example')}, expected numbers of at most "
            f"{LARGEST:g}. Correct them, state a range: --data.columns "
            f"'{treatment.name}={treatment.kind}(LOW..HIGH)', or, if they are identifiers, leave "
            f"them out: '{treatment.name}=left_out'."
        )
    return values


def _checked_numbers(treatment: Treatment, column: Any) -> Float64[np.ndarray, " examples"]:
    try:
        return numbers(column)
    except ArgumentError as error:
        name, problem = treatment.name, f"a value that is no number ({error})"
        remedy = "Correct it."
        if treatment.kind == "date":
            problem = f"texts of type {column.type}"
            remedy = (
                "Pass np.array(values, 'datetime64[s]') or Arrow timestamps, or read the file with "
                f"--data.types '{name}=timestamp[s]'."
            )
        raise ArgumentError(
            f"The column {name!r} has {problem}, expected {treatment.describe()}, as in training. "
            f"{remedy}"
        ) from None


def _booleans(name: str, column: Any) -> Float64[np.ndarray, " examples"]:
    distinct, codes = encode_texts(column)
    if unknown := sorted(set(distinct) - {"0", "1", "true", "false"}):
        raise ArgumentError(
            f"The column {name!r} has the value {unknown[0]!r}, expected true, false, 0 or 1, as "
            "in training. Correct it."
        )
    return np.array([*(value in ("true", "1") for value in distinct), False], np.float64)[codes]


class CategoryValues:
    """The values of a category, and the number of clients that have each."""

    def __init__(self, treatment: Treatment) -> None:
        self._stated = treatment.values
        self._clients: dict[str, int] = {}
        self._last: tuple[int, set[str]] = (-1, set())  # a client, and its values until now

    def add(self, column: Any, clients: Int[np.ndarray, " examples"]) -> None:
        """Add examples, in which the examples of a client follow one another."""
        distinct, codes = encode_texts(column)
        if self._stated is not None:
            self._clients |= dict.fromkeys(distinct, 1)
            return
        # Each value of each client once: a client says which values it has, not how often.
        present = codes >= 0
        count = max(len(distinct), 1)
        pairs = np.unique(clients[present] * count + codes[present])
        having = np.bincount(pairs % count, minlength=len(distinct)).tolist()
        last, before = self._last
        again = {distinct[pair % count] for pair in pairs[pairs // count == last].tolist()} & before
        for value, number in zip(distinct, having, strict=False):
            self._clients[value] = self._clients.get(value, 0) + number - (value in again)
        if len(clients):
            own = int(clients[-1])
            values = {distinct[pair % count] for pair in pairs[pairs // count == own].tolist()}
            self._last = own, values | (before if own == last else set())

    def choose(self, min_clients: int) -> tuple[tuple[str, ...], bool]:
        """Return the categories, and whether a client has another value."""
        if self._stated is not None:
            return self._stated, not self._clients.keys() <= {*self._stated}
        return common_values(self._clients, min_clients)

    def to_json(self) -> dict[str, Any]:
        """Return what a site tells others: the numbers, or whether it has a value not stated."""
        if self._stated is not None:
            return {"other": self.choose(1)[1]}
        return {"values": self._clients}


def common_values(clients: Mapping[str, int], min_clients: int) -> tuple[tuple[str, ...], bool]:
    """Return the values that enough clients have, in order, and whether there are others."""
    kept = sorted(value for value, n in clients.items() if n >= min_clients)
    return tuple(kept), len(kept) < len(clients)


@dataclasses.dataclass(frozen=True)
class ColumnSummary:
    """A column as `fedpax data` shows it.

    Attributes:
        num_missing: number of examples without a value.
        num_distinct: number of distinct values; None where values are not counted, as for lists.
        range: the least and largest value in words; empty without numbers or dates.
        note: why a column of texts has no numbers or dates, and the remedy; else empty.
        spellings: which values differ in spaces or capitals alone; else empty.
    """

    treatment: Treatment
    type: str
    num_missing: int
    num_distinct: int | None
    range: str
    note: str = ""
    spellings: str = ""

    HEAD = ("column", "type", "missing", "distinct", "range", "treatment", "because")

    def cells(self) -> list[str]:
        """Return the cells of a table's row, below `HEAD`."""
        distinct = "" if self.num_distinct is None else f"{self.num_distinct:,}"
        missing = f"{self.num_missing:,}" if self.num_missing else ""
        treatment = self.treatment
        return [
            treatment.name,
            self.type,
            missing,
            distinct,
            self.range,
            treatment.describe(),
            treatment.reason,
        ]


def summarize_columns(
    table: Mapping[str, Any], treatments: Sequence[Treatment]
) -> list[ColumnSummary]:
    """Describe the columns of a table and their treatments, from `infer_treatments`."""
    summaries = []
    for treatment in treatments:
        column = arrow_column(table[treatment.name])
        dtype = column.type
        missing = is_missing(column)
        summaries.append(
            ColumnSummary(
                treatment,
                str(dtype),
                int(missing.sum()),
                count_distinct(column) if is_counted(dtype) else None,
                value_range(column),
                _note(treatment.name, column),
                _spellings(treatment.name, column),
            )
        )
    return summaries


def _note(name: str, column: Any) -> str:
    values = TextValues()
    if is_text(column.type):
        values.add(column)
    return values.describe(name)


def _spellings(name: str, column: Any) -> str:
    if not is_text(column.type) or not is_utf8(column):
        return ""
    values = pc.unique(column.drop_null()).cast("large_string")
    if 2 * len(values) > len(column):
        return ""  # texts of no class
    plain = pc.utf8_lower(pc.utf8_trim_whitespace(values))
    counts = pc.value_counts(plain)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    if not len(repeated):
        return ""
    pair = sorted(values.filter(pc.equal(plain, repeated[0]["values"])).to_pylist())
    return (
        f"{name!r} has the values {pair[0]!r} and {pair[1]!r}, which differ in spaces or capitals "
        "alone. Write them alike in the file if they mean one."
    )


def is_counted(dtype: Any) -> bool:
    """Return whether the distinct values of a column of this Arrow type are counted."""
    return is_number(dtype) or is_date(dtype) or is_text(dtype) or str(dtype) == "bool"


def value_range(column: Any) -> str:
    """Return the least and the largest number or date in words."""
    if not (is_number(column.type) or is_date(column.type)):
        return ""
    if str(column.type).startswith("duration"):  # whose least value Arrow does not find
        column = numbers(column)
        return "" if np.isnan(column).all() else f"{np.nanmin(column):g} to {np.nanmax(column):g} d"
    if str(column.type) == "halffloat":  # which Arrow does not compare
        column = column.cast("float32")
    ends = pc.min_max(column)
    if not ends["min"].is_valid:
        return ""
    if is_date(column.type):  # as text, for those that Python's dates cannot hold
        return " to ".join(str(ends[name].cast("string")) for name in ("min", "max"))
    low, high = (float(ends[name].as_py()) for name in ("min", "max"))
    return "" if np.isnan(low) else f"{low:g} to {high:g}"
