"""TextValues: columns of texts whose values are almost all numbers, percentages or dates."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool

_NUMBER = r"^\s*[+-]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][+-]?\d+)?\s*"
_KINDS = {
    "number": f"{_NUMBER}$",
    "percentage": rf"{_NUMBER}%\s*$",
    "date": r"^\s*\d{4}-\d\d-\d\d(?:$|[ T])",
    "other date": r"^\s*\d{1,4}[./-]\d{1,2}[./-]\d{2,4}(?:$|[ T])",
}
_MOST_OTHERS = 5  # distinct values that can be marks for a missing value


class TextValues:
    """Count the values of a column of texts by what they look like, over several parts.

    Example:
        >>> values = TextValues()
        >>> values.add(["1.5", "?", "2", "?", "7"])
        >>> values.describe("age")[:66]
        "'age' is text, because it has '?' among 3 numbers. If this value m"
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_KINDS, 0)
        self._first: dict[str, str] = {}
        self._others: dict[str, None] = {}
        self._num_others = 0
        self._is_text = False  # more distinct values than marks

    def add(self, column: Any) -> None:
        """Count the values of a part; a missing value is not counted."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._is_text:
            return
        rest = pc.drop_null(column if isinstance(column, pa.Array) else pa.array(column))
        if pa.types.is_dictionary(rest.type):
            rest = rest.cast(rest.type.value_type)
        for kind, pattern in _KINDS.items():
            matches: Bool[np.ndarray, " values"] = np.asarray(
                pc.match_substring_regex(rest, pattern)
            ).astype(bool)
            if matches.any():
                self._first.setdefault(kind, rest[int(matches.argmax())].as_py())
                self._counts[kind] += int(matches.sum())
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
