"""summarize_columns: what `fedpax data` shows of the columns of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedpax.data.tables.text_values import TextValues
from fedpax.data.tables.treatments import Treatment, count_distinct
from fedpax.data.tables.values import (
    arrow_column,
    is_date,
    is_missing,
    is_number,
    is_text,
    numbers,
)


@dataclasses.dataclass(frozen=True)
class ColumnSummary:
    """A column as `fedpax data` shows it.

    Attributes:
        treatment: its treatment.
        type: the type of its values.
        num_missing: number of examples without a value.
        num_distinct: number of distinct values; None where values are not counted, as for lists.
        range: the least and largest value in words; empty without numbers or dates.
        note: why a column of texts has no numbers or dates, and the remedy; else empty.
    """

    treatment: Treatment
    type: str
    num_missing: int
    num_distinct: int | None
    range: str
    note: str = ""

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
    """Describe the columns of a table and their treatments.

    Args:
        table: the columns by name.
        treatments: their treatments, from `infer_treatments`.

    Example:
        >>> from fedpax.data.tables.treatments import infer_treatments
        >>> table = {"age": [31.5, None, 60.0]}
        >>> [summary] = summarize_columns(table, infer_treatments(table))
        >>> summary.cells()
        ['age', 'double', '1', '2', '31.5 to 60', 'number:mean', 'numbers']
    """
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
            )
        )
    return summaries


def _note(name: str, column: Any) -> str:
    if not is_text(column.type):
        return ""
    values = TextValues()
    values.add(column)
    return values.describe(name)


def is_counted(dtype: Any) -> bool:
    """Return whether the distinct values of a column of this Arrow type are counted."""
    return is_number(dtype) or is_date(dtype) or is_text(dtype) or str(dtype) == "bool"


def value_range(column: Any) -> str:
    """Return the least and the largest number or date in words."""
    import pyarrow.compute as pc

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
    return " to ".join(f"{float(ends[name].as_py()):g}" for name in ("min", "max"))
