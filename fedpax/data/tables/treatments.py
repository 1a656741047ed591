"""The treatment of a table's columns: inferred by a stated rule, and changed by name."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from fedpax.checks import check_distinct
from fedpax.console import count_of
from fedpax.data.tables.values import (
    arrow_pieces,
    encode_texts,
    is_date,
    is_missing,
    is_number,
    is_text,
    is_utf8,
    numbers,
    pa,
    pc,
)
from fedpax.errors import ArgumentError
from fedpax.lazy_names import warn_deprecated

Kind: TypeAlias = Literal["number", "date", "boolean", "category", "left_out"]
"""What a column becomes: standardized numbers, 0 and 1, one feature a category, or nothing."""

Missing: TypeAlias = Literal["mean", "false", "category", "error"]
"""What a missing value becomes: the mean or false, and an indicator; a category; or an error."""

MAX_CATEGORIES = 50
"""A text column with more distinct values is left out, unless its treatment is stated."""

MOST_COUNTED = 1_000_000
"""Distinct values of a column are counted up to this number if it is in several pieces."""


class Treatment(NamedTuple):
    """The treatment of a column.

    Attributes:
        name: the column.
        kind: what it becomes.
        missing: what a missing value becomes; None if the column is left out.
        values: the stated categories. None: the training clients' categories.
        bounds: the stated least and largest number, to which numbers are clipped.
        reason: "stated", or the rule that applied.

    """

    name: str
    kind: Kind
    missing: Missing | None
    values: tuple[str, ...] | None = None
    bounds: tuple[float, float] | None = None
    reason: str = "stated"

    def describe(self) -> str:
        """Return the treatment as `parse_treatment` takes it, without the name."""
        inner = ""
        if self.bounds is not None:
            # Exact, since sites compare it: two bounds can agree in their first digits.
            inner = f"({'..'.join(repr(float(x)).removesuffix('.0') for x in self.bounds)})"
        elif self.values is not None:
            inner = f"({'|'.join(self.values)})"
        return f"{self.kind}{inner}{f':{self.missing}' if self.missing else ''}"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Treatment:
        """Make the treatment from the values of `_asdict`."""
        return cls(**with_tuples(fields))


def with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of JSON with tuples for lists."""
    return {n: tuple(x) if isinstance(x, list) else x for n, x in fields.items()}


_FORM = re.compile(
    r"(?P<name>.+)=(?P<kind>[a-z_]+)(\((?P<inner>.*)\))?(:(?P<missing>[a-z]+))?", re.DOTALL
)
_DEFAULT_MISSING: Mapping[str, Missing | None] = {
    "number": "mean",
    "date": "mean",
    "boolean": "false",
    "category": "category",
    "left_out": None,
}


def parse_treatment(text: str) -> Treatment:
    """Parse the treatment of a column, as `--data.columns` has it.

    Args:
        text: "NAME=KIND", "NAME=KIND:MISSING", "NAME=number(LOW..HIGH)",
            "NAME=date(2024-01-01..2024-12-31)" or "NAME=category(A|B|C)". KIND is number, date,
            boolean, category or left_out. MISSING is mean, false, category or error. `*` in NAME is
            any text: all columns that match and that no name without `*` states.

    Raises:
        ValueError: the text has another form.

    Example:
        >>> parse_treatment("sex=category(f|m)").values
        ('f', 'm')
    """
    match = _FORM.fullmatch(text)
    kind: Any = match["kind"] if match else None
    if match is None or kind not in get_args(Kind):
        raise ArgumentError(
            f"data.columns has {text!r}, expected NAME=KIND with KIND one of "
            f"{', '.join(get_args(Kind))}. Set for example --data.columns age=number "
            "zip=left_out 'sex=category(f|m)' 'weight=number(0..300):error'."
        )
    missing: Any = match["missing"] or _DEFAULT_MISSING[kind]
    if (kind, missing) == ("boolean", "mean"):
        warn_deprecated("boolean:mean", "boolean:false", removed_in="0.3.0")
        missing = "false"
    allowed = {_DEFAULT_MISSING[kind], "error"} - ({"error"} if kind == "left_out" else set())
    if missing not in allowed:
        words = " or ".join(sorted(map(str, allowed))) if kind != "left_out" else "nothing"
        raise ArgumentError(
            f"data.columns has {text!r}: a missing value of a {kind} becomes {words}, not "
            f"{missing}. Set --data.columns {match['name']}={kind}."
        )
    treatment = Treatment(match["name"], kind, missing)
    inner = match["inner"]
    if inner is None:
        return treatment
    if kind == "category":
        values = tuple(inner.split("|"))
        if len(set(values)) == len(values) and all(values):
            return treatment._replace(values=values)
    elif kind in ("number", "date"):
        try:
            low, high = (_bound(kind, end) for end in inner.split(".."))
        except ValueError:
            low, high = math.nan, math.nan
        if -math.inf < low < high < math.inf:
            return treatment._replace(bounds=(low, high))
    raise ArgumentError(
        f"data.columns has {text!r}, expected number(LOW..HIGH) or date(LOW..HIGH) with LOW below "
        "HIGH (dates such as 2024-01-31, or in days since 1970-01-01), or category(A|B) with "
        "different values. Set for example --data.columns 'weight=number(0..300)'."
    )


def _bound(kind: Kind, text: str) -> float:
    """Return an end of a range; a date in days, as `numbers` returns it."""
    try:
        return float(text)
    except ValueError:
        if kind != "date":
            raise
    moment = datetime.fromisoformat(text.strip())
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime.fromtimestamp(0, UTC)) / timedelta(days=1)


def infer_treatments(
    table: Mapping[str, Any],
    stated: Sequence[str] = (),
    *,
    max_categories: int = MAX_CATEGORIES,
) -> tuple[Treatment, ...]:
    """Return the treatment of each column of a table.

    The rule, where no treatment is stated:

    - booleans are booleans, numbers are numbers, dates and times are dates;
    - text is a category if it has at most `max_categories` distinct values and, on average, at
      least two examples of each, missing values not counted; other text is left out;
    - a column without any value, and one of lists, images or other values, is left out.

    A missing value is null, NaN or an empty text. It becomes the mean (numbers, dates) or false
    (booleans), beside an indicator feature; in a category, it is a separate category.

    Args:
        table: the columns by name, Arrow or NumPy arrays or lists, without label and client.
        stated: treatments, as `parse_treatment` takes them.
        max_categories: the largest number of distinct values of a text that is a category.

    Returns:
        The treatments, in the order of the columns.

    Raises:
        ValueError: a stated treatment is malformed or names no column, two have the same name, or a
            column cannot have the stated kind.

    Example:
        >>> table = {"age": [31, None], "note": ["came late", "no pain"], "day": [None, None]}
        >>> for treatment in infer_treatments(table, ["day=number"]):
        ...     print(treatment.name, treatment.describe(), "-", treatment.reason)
        age number:mean - numbers
        note left_out - text of 2 distinct values in 2 examples
        day number:mean - stated
    """
    parsed = [parse_treatment(text) for text in stated]
    names = [treatment.name for treatment in parsed]
    check_distinct("data.columns", names, remedy="Leave out all but one.")
    for name in names:
        if name not in table and not any(_matches(name, column) for column in table):
            remedy = (
                "Separate several columns by spaces: 'age=number' 'ward=category'."
                if "=" in name
                else "Correct the name; the label and the client are not features."
            )
            raise ArgumentError(
                f"data.columns states {name!r}, expected one of the columns "
                f"{', '.join(map(repr, table))}. {remedy}"
            )
    exact = {treatment.name: treatment for treatment in parsed}
    treatments = []
    for name, values in table.items():
        pieces = arrow_pieces(values)
        treatment = exact.get(name) or next(
            (t._replace(name=name) for t in parsed if _matches(t.name, name)), None
        )
        if treatment is None:
            treatment = _infer(name, pieces, max_categories)
        else:
            for piece in pieces:
                _check_kind(treatment, piece)
        treatments.append(treatment)
    return tuple(treatments)


def _matches(pattern: str, name: str) -> bool:
    """Return whether a name with `*` matches a column; brackets are letters of a name."""
    literal = re.sub(r"([\[?])", r"[\1]", pattern)
    return "*" in pattern and fnmatch.fnmatchcase(name, literal)


def _infer(name: str, pieces: Sequence[Any], max_categories: int) -> Treatment:
    missing = sum(int(np.sum(is_missing(piece))) for piece in pieces)
    examples = sum(map(len, pieces))
    dtype = pieces[0].type
    if is_text(dtype) and not all(map(is_utf8, pieces)):
        return Treatment(name, "left_out", None, reason="bytes that are no text")
    distinct = count_distinct(*pieces) if missing < examples and is_text(dtype) else None
    return infer_treatment(name, dtype, examples, missing, distinct, max_categories)


def infer_treatment(
    name: str,
    dtype: Any,
    examples: int,
    missing: int,
    distinct: int | None,
    max_categories: int = MAX_CATEGORIES,
) -> Treatment:
    """Apply the rule of `infer_treatments` to a column of which only counts are known."""

    def make(kind: Kind, reason: str) -> Treatment:
        return Treatment(name, kind, _DEFAULT_MISSING[kind], reason=reason)

    present = examples - missing
    if not present:
        return make("left_out", "no values")
    if str(dtype) == "bool":
        return make("boolean", "booleans")
    if is_number(dtype):
        return make("number", "numbers")
    if is_date(dtype):
        return make("date", "dates or times")
    if not is_text(dtype) or distinct is None:
        return make("left_out", f"values of type {dtype}")
    values = f"{describe_count(distinct)} distinct value{'s' * (distinct != 1)}"
    of_all = f"{present:,} of " if missing else ""
    words = f"text of {values} in {of_all}{count_of(examples, 'example')}"
    if distinct <= max_categories and 2 * distinct <= present:
        return make("category", words)
    return make("left_out", words)


def count_distinct(*pieces: Any) -> int:
    """Return the number of distinct values of Arrow arrays together, without missing ones."""
    present = (pc.filter(piece, pa.array(~is_missing(piece))) for piece in pieces)
    if len(pieces) == 1:
        return int(pc.count_distinct(*present).as_py())
    known = pa.array([], pieces[0].type)
    for piece in present:
        known = pc.unique(pa.concat_arrays([known, pc.unique(piece)]))
        if len(known) > MOST_COUNTED:
            break
    return len(known)


def describe_count(distinct: int) -> str:
    """Return a number of `count_distinct` in words."""
    return f"{distinct:,}" if distinct <= MOST_COUNTED else f"more than {MOST_COUNTED:,}"


def _check_kind(treatment: Treatment, column: Any) -> None:
    """Check that a column can have a stated kind."""
    name, kind = treatment.name, treatment.kind
    if kind == "left_out":
        return
    dtype = str(column.type)
    if kind == "date" and not (is_date(column.type) or is_number(column.type) or dtype == "null"):
        raise ArgumentError(
            f"data.columns states {name}=date, but its values are {dtype}, expected dates, times "
            f"or numbers. Set --data.types '{name}=timestamp[s]' for texts such as 2024-12-31 "
            "08:30:00, or state another kind."
        )
    if kind == "boolean" and dtype not in ("bool", "null"):
        if others := {*encode_texts(column)[0]} - {"0", "1", "true", "false"}:
            raise ArgumentError(
                f"data.columns states {name}=boolean, but it has the value {min(others)!r}, "
                f"expected true, false, 0 or 1. Set --data.columns {name}=category."
            )
    if kind in ("number", "date"):
        try:
            numbers(column)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise ArgumentError(
                f"data.columns states {name}={kind}, but its values are not numbers ({error}). Set "
                f"--data.columns {name}=category or {name}=left_out."
            ) from None
