"""A column of a table as features: its treatment, and what it needs from the training clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int
from numpy.typing import NDArray

from fedpax.data.tables.treatments import Treatment
from fedpax.data.tables.values import arrow_column, encode_texts, is_missing, numbers
from fedpax.errors import ArgumentError

LARGEST = 1e18
"""The largest number of a column without a range: float32 holds its square."""


@dataclasses.dataclass(frozen=True)
class FittedColumn:
    """A column's treatment, and what it needs from the training clients.

    Attributes:
        treatment: the treatment.
        categories: the categories in order; () for another kind.
        mean: the mean over the training clients; 0 for another kind than numbers and dates.
        scale: the standard deviation likewise, or 1 if it is 0.
        has_missing: whether a training client misses a value: there is a feature for it.
        has_other: whether a training client has a value that is not one of the categories: there is
            a feature for it. Without it, another value has 0 in all features of the column.
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
        """Return the features of some examples.

        Args:
            values: the column's values of these examples.

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
    try:
        values = numbers(column)
    except ArgumentError as error:
        raise ArgumentError(
            f"The column {treatment.name!r} has a value that is no number, expected "
            f"{treatment.describe()}, as in training ({error}). Correct it."
        ) from None
    if treatment.bounds is not None:
        return np.clip(values, *treatment.bounds)
    too_large = np.abs(values) > LARGEST
    if too_large.any():
        first = int(np.argmax(too_large))
        raise ArgumentError(
            f"The column {treatment.name!r} is {values[first]:g} in example {first}, and too large "
            f"in {int(too_large.sum()):,} examples, expected numbers of at most {LARGEST:g}. "
            f"Correct them, or state a range: --data.columns '{treatment.name}={treatment.kind}"
            "(LOW..HIGH)'."
        )
    return values


def _booleans(name: str, column: Any) -> Float64[np.ndarray, " examples"]:
    """Return booleans as 0 and 1."""
    distinct, codes = encode_texts(column)
    if unknown := sorted(set(distinct) - {"0", "1", "true", "false"}):
        raise ArgumentError(
            f"The column {name!r} has the value {unknown[0]!r}, expected true, false, 0 or 1, as "
            "in training. Correct it."
        )
    return np.array([*(value in ("true", "1") for value in distinct), False], np.float64)[codes]
