"""Values of a table's column as NumPy arrays: numbers, days, and texts, with missing values."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.extras import LazyModule

pa, pc = LazyModule("pyarrow"), LazyModule("pyarrow.compute")

MICROSECONDS_PER_DAY = 86_400_000_000


def arrow_column(values: Any) -> Any:
    """Return a column as one Arrow array; NaN of a NumPy array is null."""
    if isinstance(values, pa.ChunkedArray):
        column = values.combine_chunks()
    elif isinstance(values, pa.Array):
        column = values
    else:
        mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
        try:
            column = pa.array(
                np.ma.getdata(values) if mask is not None else values, mask=mask, from_pandas=True
            )
        except pa.ArrowException as error:
            raise ArgumentTypeError(
                f"A column has values of several types ({error}), expected one type. Convert them "
                "to texts or to numbers."
            ) from None
    if isinstance(column, pa.ChunkedArray):  # combine_chunks, where one array cannot hold them
        column = pa.concat_arrays(column.chunks)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column


def arrow_pieces(values: Any) -> list[Any]:
    """Return a column as Arrow arrays, at least one: chunks where they are, without a copy."""
    if isinstance(values, pa.ChunkedArray) and values.num_chunks:
        return [arrow_column(chunk) for chunk in values.chunks]
    return [arrow_column(values)]


def is_missing(column: Any) -> Bool[np.ndarray, " examples"]:
    """Return where a column has no value: null, NaN, or an empty text."""
    missing = pc.is_null(column, nan_is_null=True)
    if is_text(column.type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(pc.binary_length(column), 0), True))
    return np.asarray(missing.to_numpy(zero_copy_only=False), np.bool_)


def is_text(dtype: Any) -> bool:
    """Return whether an Arrow type is text, or bytes that hold text."""
    types = pa.types
    return bool(
        types.is_string(dtype)
        or types.is_large_string(dtype)
        or types.is_string_view(dtype)
        or types.is_binary(dtype)
        or types.is_large_binary(dtype)
    )


def is_number(dtype: Any) -> bool:
    """Return whether an Arrow type is integers, floats or decimals."""
    types = pa.types
    return bool(types.is_integer(dtype) or types.is_floating(dtype) or types.is_decimal(dtype))


def is_date(dtype: Any) -> bool:
    """Return whether an Arrow type is dates, times or durations."""
    types = pa.types
    return bool(types.is_temporal(dtype) and not types.is_interval(dtype))


def numbers(column: Any) -> Float64[np.ndarray, " examples"]:
    """Return numbers; dates are days since 1970, durations days; NaN where there is no value."""
    dtype = column.type
    if is_date(dtype):
        column = _microseconds(column)
        return _floats(column) / MICROSECONDS_PER_DAY
    if is_text(dtype):
        present = ~is_missing(column)
        column = pc.if_else(pa.array(present), column, pa.scalar(None, dtype))
        try:
            return _floats(pc.cast(_decoded(column), pa.float64()))
        except pa.ArrowInvalid as error:
            raise ArgumentError(f"{error}") from None
    return _floats(column)


def encode_texts(column: Any) -> tuple[list[str], Int64[np.ndarray, " examples"]]:
    """Return the distinct values as texts, in which 3 and 3.0 are equal, and the places."""
    missing = is_missing(column)
    dtype = column.type
    if is_text(dtype):
        column = _decoded(column)
    elif pa.types.is_floating(dtype):
        column = _without_decimal_point(column, missing)
    else:
        column = pc.cast(column, pa.string())
    column = pc.if_else(pa.array(~missing), column, pa.scalar(None, column.type))
    encoded = column.dictionary_encode()
    places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), np.asarray(places, np.int64)


def texts(column: Any) -> NDArray[np.object_]:
    """Return a column as texts; None where it has no value. See `encode_texts`."""
    distinct, places = encode_texts(column)
    return np.array([*distinct, None], object)[places]


def _without_decimal_point(column: Any, missing: Bool[np.ndarray, " examples"]) -> Any:
    """Return floats as Arrow strings; whole numbers as integers if all of them are whole."""
    values = np.where(missing, 0, _floats(column))
    if np.all(np.abs(values) < 2.0**63) and np.all(np.trunc(values) == values):
        column = pa.array(values.astype(np.int64))
    return pc.cast(column, pa.string())


def is_utf8(column: Any) -> bool:
    """Return whether a column of texts or bytes is UTF-8."""
    try:
        _decoded(column)
    except ArgumentError:
        return False
    return True


def _decoded(column: Any) -> Any:
    try:
        return pc.cast(column, pa.string())
    except pa.ArrowInvalid:
        raise ArgumentError(
            "A column of bytes is not UTF-8, expected text. Leave it out, or convert it."
        ) from None


def _microseconds(column: Any) -> Any:
    dtype, types = column.type, pa.types
    if types.is_date(dtype):
        column = pc.cast(column, pa.timestamp("us"))
    elif types.is_timestamp(dtype):
        column = pc.cast(column, pa.timestamp("us", dtype.tz), safe=False)
    elif types.is_duration(dtype):
        column = pc.cast(column, pa.duration("us"), safe=False)
    else:
        column = pc.cast(column, pa.time64("us"), safe=False)
    return pc.cast(column, pa.int64())


def _floats(column: Any) -> Float64[np.ndarray, " examples"]:
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.int8())
    column = pc.cast(column, pa.float64(), safe=False)
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)


# TextValues: columns of texts whose values are almost all numbers, percentages or dates.
_NUMBER = r"^\s*[+-]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][+-]?\d+)?\s*"
_KINDS = {
    "number": f"{_NUMBER}$",
    "percentage": rf"{_NUMBER}%\s*$",
    "date": r"^\s*\d{4}-\d\d-\d\d(?:$|[ T])",
    "other date": r"^\s*\d{1,4}[./-]\d{1,2}[./-]\d{2,4}(?:$|[ T])",
}
_MOST_OTHERS = 5  # distinct values that can be marks for a missing value


class TextValues:
    """Count the values of a column of texts by what they look like, over several parts."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_KINDS, 0)
        self._first: dict[str, str] = {}
        self._others: dict[str, None] = {}
        self._num_others = 0
        self._is_text = False  # more distinct values than marks

    def add(self, column: Any) -> None:
        """Count the values of a part; a missing value is not counted."""
        if self._is_text:
            return
        rest = pc.drop_null(column if isinstance(column, pa.Array) else pa.array(column))
        if pa.types.is_dictionary(rest.type):
            rest = rest.cast(rest.type.value_type)
        for notation, pattern in _KINDS.items():
            matches: Bool[np.ndarray, " values"] = np.asarray(
                pc.match_substring_regex(rest, pattern)
            ).astype(bool)
            if matches.any():
                self._first.setdefault(notation, rest[int(matches.argmax())].as_py())
                self._counts[notation] += int(matches.sum())
                rest = rest.filter(pa.array(~matches))
        self._num_others += len(rest)
        self._others |= dict.fromkeys(pc.unique(rest).slice(0, _MOST_OTHERS + 1).to_pylist())
        self._is_text = len(self._others) > _MOST_OTHERS

    def describe(self, name: str) -> str:
        """Return why the column is text, and the remedy; empty for a column of plain texts."""
        if self._is_text or not any(self._counts.values()):
            return ""
        counts, first = self._counts, self._first
        if counts["other date"] and not counts["number"] and not self._others:
            return (
                f"{name!r} is text, because dates such as {first['other date']!r} are not read. "
                "Write all of its dates as 2024-01-31."
            )
        if counts["percentage"] and not self._others:
            return (
                f"{name!r} is text, because it has percent signs, such as in "
                f"{first['percentage']!r}. Remove them from the file for numbers."
            )
        kind = max(counts, key=lambda kind: counts[kind])
        if self._others and self._num_others <= counts[kind]:
            plural = {"percentage": "percentages"}.get(kind, f"{kind}s")
            marks = ", ".join(map(repr, self._others))
            several = len(self._others) > 1
            return (
                f"{name!r} is text, because it has {marks} among {counts[kind]:,} {plural}. If "
                f"{'these values mean' if several else 'this value means'} that a value is "
                f"missing, leave {'them' if several else 'it'} empty in the file."
            )
        return ""
