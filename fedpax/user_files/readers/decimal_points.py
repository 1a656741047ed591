"""Errors for columns of CSV whose numbers are read as texts because of points or commas."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedpax.errors import ArgumentError
from fedpax.user_files.formats import ReadOptions

_SPACES = "'\u2019 \u00a0\u202f"  # apostrophes and spaces that separate thousands
_GROUPED = (
    rf"\d{{1,3}}(?:[.{_SPACES}]\d{{3}})+,\d+|\d{{1,3}}(?:[,{_SPACES}]\d{{3}})+\.\d+"
    r"|\d{1,3}(?:(?:\.\d{3}){2,}|(?:,\d{3}){2,})"
)
_NUMBER = rf"^\s*[+-]?(?:{_GROUPED}|\d*[.,]?\d+(?:[eE][+-]?\d+)?)\s*$"


def check_decimal_points(table: pa.Table, options: ReadOptions) -> None:
    """Raise an error for a column of texts that are numbers with another decimal point."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        is_read = not options.columns or name in options.columns
        if is_read and name not in options.types and pa.types.is_string(column.type):
            for chunk in column.chunks:
                values = chunk.drop_null()
                # A few values decide for almost all texts.
                if not (_match(values[:100], _NUMBER).all() and _match(values, _NUMBER).all()):
                    break
                _check_values(name, values, options.decimal_point or ".")


def check_stated_number(error: Exception, column: str | None, options: ReadOptions) -> None:
    """Raise an error for a decimal comma or separated thousands where the type is stated."""
    grouped = re.search(rf"invalid value '([+-]?(?:{_GROUPED}))'", str(error))
    if grouped and column in options.types:
        raise ArgumentError(
            f"its column {column!r} has numbers with thousands separators, such as {grouped[1]!r}. "
            "Write them in the file with one decimal point and without separators, or set "
            f"types={{{column!r}: 'string'}} to keep texts"
        ) from error
    value = re.search(r"invalid value '(-?\d*,\d+)'", str(error))
    if value and column in options.types and options.decimal_point != ",":
        raise ArgumentError(
            f"its column {column!r} has numbers with decimal commas: "
            f"{' '.join(str(error).split())}. Set decimal_point=','"
        ) from error


def _check_values(name: str, values: pa.Array, point: str) -> None:
    """Raise an error for a value that is not read as a number."""
    other = "," if point == "." else "."
    grouped = _match(values, rf"^\s*[+-]?(?:{_GROUPED})\s*$")
    decimal = _match(values, rf"^[^{point}]*\{other}[^{point}]*$") & ~grouped
    mixed = grouped if grouped.any() else decimal & _match(values, rf"\{point}").any()
    keep = f"or set types={{{name!r}: 'string'}} to keep texts"
    if mixed.any():
        raise ArgumentError(
            f"its column {name!r} has numbers with thousands separators or with both points and "
            f"commas, such as {_first(values, mixed)!r}, which are read as texts. Write them in "
            f"the file with one decimal point and without separators, {keep}"
        )
    if decimal.any():
        value = _first(values, decimal)
        remedy = f"Set decimal_point={other!r} for numbers"
        if point == ",":
            remedy = f"Leave decimal_point=',' out if {value!r} is a number with a decimal point"
        if re.fullmatch(r"[+-]?[1-9]\d{0,2}[.,]\d{3}", value.strip()):  # 1.234, or 1234
            remedy += f", remove the {other!r} from the file if it separates thousands"
        raise ArgumentError(
            f"its column {name!r} has the value {value!r}, which is read as text, because "
            f"decimal_point is {point!r}. {remedy}, {keep}"
        )


def _match(values: pa.Array, pattern: str) -> NDArray[np.bool_]:
    """Return which texts match a regular expression."""
    return np.asarray(pc.match_substring_regex(values, pattern), np.bool_)


def _first(values: pa.Array, chosen: NDArray[np.bool_]) -> str:
    return str(values[int(np.argmax(chosen))])
