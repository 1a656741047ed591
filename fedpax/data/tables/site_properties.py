"""What the tables of sites must have in common, from what each site tells of its own."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from fedpax.data.tables.labels import Label, Task
from fedpax.data.tables.treatments import Kind, Missing, Treatment
from fedpax.errors import ArgumentError

LABEL, KIND, CLASSES = "the label", "the kind of the label", "the stated classes of the label"
"""Names of properties."""

NUMBERS = "numbers to predict"
"""The kind of a label for regression."""


def table_properties(description: Mapping[str, Any]) -> dict[str, str]:
    """Return what sites must have in common for `agree_on_table`, in words by name.

    A column without values, or that a site lacks, has no property. Text of few and of many values
    is one kind.
    """
    fields = description["label"]
    _check(isinstance(fields, dict), "label", fields)
    stated, is_number = fields.get("stated"), description["number"]
    _check(type(stated) is bool and type(is_number) is bool, "label", fields)
    label = checked_label({name: value for name, value in fields.items() if name != "stated"})
    _check(not stated or all(map(_is_stated, label.classes)), "classes", label.classes)
    properties = {LABEL: label.name, CLASSES: "|".join(label.classes) if stated else "none"}
    if label.task == "regression":
        properties[KIND] = NUMBERS
    elif not is_number:
        properties[KIND] = "classes that are text"
    elif not stated:
        _check(all(map(_is_number, label.classes)), "classes", label.classes)
    columns = description["columns"]
    _check(isinstance(columns, list), "columns", columns)
    treatments = {t.name: t for t in map(_checked_treatment, columns)}
    unique = len(treatments) == len(columns) and label.name not in treatments
    _check(unique, "columns", [t.name for t in treatments.values()])
    _check_categories(description["categories"], treatments)
    missing = description["missing"]
    _check(isinstance(missing, list) and set(missing) <= treatments.keys(), "missing", missing)
    return properties | {
        column_property(t.name): describe_kind(t)
        for t in treatments.values()
        if t.reason != "no values"
    }


def column_property(name: str) -> str:
    """Return the name of the property of a column."""
    return f"the column {name!r}"


def describe_kind(treatment: Treatment) -> str:
    """Describe the kind of a column; text that is left out for its many values is text."""
    shown = treatment.describe()
    is_text = shown in ("category:category", "left_out")
    return "text" if is_text and treatment.reason != "stated" else shown


def checked_label(fields: Any) -> Label:
    """Make a label from JSON of a site; raise a `ValueError` if it is malformed."""
    _check(
        isinstance(fields, dict) and fields.keys() == Label("", "regression").to_json().keys(),
        "label",
        fields,
    )
    label = Label.from_json(fields)
    is_class = label.task == "classification"
    fits = _is_text(label.name) and label.task in get_args(Task)
    fits = fits and _is_text(label.reason) and all(map(_is_text, label.classes))
    fits = fits and all(
        type(x) in (int, float) and math.isfinite(x) for x in (label.mean, label.scale)
    )
    fits = fits and isinstance(fields["classes"], list | tuple) and is_class == bool(label.classes)
    _check(fits and len({*label.classes}) == len(label.classes), "label", fields)
    return label


def _checked_treatment(fields: Any) -> Treatment:
    _check(isinstance(fields, dict) and fields.keys() == {*Treatment._fields}, "column", fields)
    values, bounds = fields["values"], fields["bounds"]
    _check(
        values is None or (isinstance(values, list | tuple) and all(map(_is_stated, values))),
        "column",
        fields,
    )
    _check(
        bounds is None or (len(bounds) == 2 and all(type(x) in (int, float) for x in bounds)),
        "column",
        fields,
    )
    kind = fields["kind"]
    fits = _is_text(fields["name"]) and _is_text(fields["reason"]) and kind in get_args(Kind)
    fits = fits and (values is None or kind == "category")
    fits = fits and (bounds is None or kind in ("number", "date"))
    left_out = kind == "left_out" and fields["missing"] is None
    _check(fits and (left_out or fields["missing"] in get_args(Missing)), "column", fields)
    return Treatment.from_json(fields)


def _check_categories(categories: Any, treatments: Mapping[str, Treatment]) -> None:
    _check(isinstance(categories, dict), "categories", categories)
    for name, values in categories.items():
        treatment = treatments.get(name)
        _check(treatment is not None and treatment.kind == "category", "categories", name)
        assert treatment is not None
        if treatment.values is not None:
            fits = values.keys() == {"other"} and type(values["other"]) is bool
        else:
            counts = values["values"]
            fits = values.keys() == {"values"} and all(map(_is_text, counts))
            fits = fits and all(type(n) is int and n >= 0 for n in counts.values())
        _check(fits, f"categories of {name!r}", values)


def _is_text(value: Any) -> bool:
    # Half of a surrogate pair can be in JSON, and not in a file.
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_stated(value: Any) -> bool:
    """Return whether a value can be among the stated ones, which are divided by '|'."""
    return _is_text(value) and "|" not in value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _check(fits: bool, name: str, value: Any) -> None:
    if not fits:
        raise ArgumentError(
            f"{name} is {value!r:.100}, expected the form of `fedpax join`. Use the same version "
            "of fedpax on both sides."
        )
