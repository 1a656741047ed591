"""One treatment of a table's columns for sites that show each other no example."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from jaxtyping import Int

from fedpax.data.tables.fitted_column import CategoryValues, checked_missing, common_values
from fedpax.data.tables.labels import MAX_CLASSES, Label, Task
from fedpax.data.tables.treatments import MAX_CATEGORIES, Kind, Missing, Treatment
from fedpax.data.tables.values import arrow_column, is_number
from fedpax.errors import ArgumentError

Json = Mapping[str, Any]


class AgreedTable(NamedTuple):
    """What sites agree on before they compute means.

    `categories` has the values of each category, and whether a client has another one; `missing`
    the columns of which a client misses a value.
    """

    label: Label
    treatments: tuple[Treatment, ...]
    categories: Mapping[str, tuple[tuple[str, ...], bool]]
    missing: frozenset[str]


def describe_table(
    table: Mapping[str, Any],
    treatments: Sequence[Treatment],
    label: Label,
    has_stated_classes: bool,
) -> dict[str, Any]:
    """Return what a site tells of its training columns, as JSON, without values of text."""
    missing = [
        t.name
        for t in treatments
        if t.kind != "left_out" and checked_missing(t, arrow_column(table[t.name])).any()
    ]
    return {
        # A reason can tell numbers of examples and of values.
        "columns": [
            t._asdict() | {"reason": t.reason if t.reason in ("stated", "no values") else t.kind}
            for t in treatments
        ],
        "missing": missing,
        **describe_label(label, table[label.name], has_stated_classes),
    }


def describe_categories(
    table: Mapping[str, Any],
    treatments: Sequence[Treatment],
    clients: Int[np.ndarray, " examples"],
) -> dict[str, Any]:
    """Return the values of a site's categories, and how many clients have each, as JSON."""
    categories = {}
    for treatment in treatments:
        if treatment.kind == "category":
            values = CategoryValues(treatment)
            values.add(arrow_column(table[treatment.name]), clients)
            categories[treatment.name] = values.to_json()
    return categories


def describe_label(label: Label, values: Any, has_stated_classes: object) -> dict[str, Any]:
    """Return what a site tells of its label, as JSON."""
    return {
        # The whole reason tells a number of values.
        "label": label.to_json()
        | {"stated": bool(has_stated_classes), "reason": label.reason.partition(" with ")[0]},
        "number": is_number(arrow_column(values).type),
    }


def agree_on_kinds(descriptions: Sequence[Json]) -> list[Treatment]:
    """Return the treatment of each column that all sites share, before they tell categories."""
    names = dict.fromkeys(c["name"] for d in descriptions for c in d["columns"])
    return [_agree_on_kind(name, descriptions) for name in names]


def agree_on_table(
    descriptions: Sequence[Json],
    by_site: Sequence[Json],
    *,
    max_categories: int = MAX_CATEGORIES,
    min_clients: int = 1,
    task: Task | None = None,
) -> AgreedTable:
    """Return the treatment that all sites share; categories have `min_clients` clients.

    `by_site` has what `describe_categories` returns at each site.
    """
    treatments, categories = [], {}
    for treatment in agree_on_kinds(descriptions):
        name = treatment.name
        if treatment.kind == "category":
            values, other = _merge_categories(treatment, by_site, min_clients)
            if treatment.values is None and len(values) + other > max_categories:
                words = f"text of more than {max_categories} distinct values"
                treatment = Treatment(name, "left_out", None, reason=words)
            else:
                categories[name] = values, other
        treatments.append(treatment)
    missing = {name for d in descriptions for name in d["missing"]}
    # A site without a column misses all of its values.
    missing |= {
        t.name
        for t in treatments
        if any(t.name not in {c["name"] for c in d["columns"]} for d in descriptions)
    }
    label = agree_on_label(descriptions, task)
    return AgreedTable(label, tuple(treatments), categories, frozenset(missing))


def _agree_on_kind(name: str, descriptions: Sequence[Json]) -> Treatment:
    own = [c for d in descriptions for c in d["columns"] if c["name"] == name]
    treatments = [*map(Treatment.from_json, own)]
    with_values = [t for t in treatments if t.reason != "no values"]
    kinds = {t.kind for t in with_values}
    if not kinds:
        return treatments[0]
    if kinds == {"category", "left_out"}:  # a text of too many values at some sites
        return next(t for t in with_values if t.kind == "left_out")
    if len({t[1:5] for t in with_values}) > 1:
        described = " and ".join(sorted({t.describe() for t in with_values}))
        raise ArgumentError(
            f"The column {name!r} is {described} at different sites, expected one treatment. State "
            f"it at the syncer and at each site: --data.columns '{name}=KIND'."
        )
    return with_values[0]


def _merge_categories(
    treatment: Treatment, by_site: Sequence[Json], min_clients: int
) -> tuple[tuple[str, ...], bool]:
    own = [each[treatment.name] for each in by_site if treatment.name in each]
    if treatment.values is not None:
        return treatment.values, any(each.get("other") for each in own)
    having: dict[str, int] = {}
    for each in own:
        for value, count in each.get("values", {}).items():
            having[value] = having.get(value, 0) + count
    return common_values(having, min_clients)


def agree_on_label(descriptions: Sequence[Json], task: Task | None) -> Label:
    """Return the label that all sites share, with the classes of all of them."""
    labels = [d["label"] for d in descriptions]
    first = labels[0]
    name, tasks = first["name"], {label["task"] for label in labels}
    numeric = all(d["number"] for d in descriptions)
    if len(tasks) > 1 and not numeric:
        raise ArgumentError(
            f"The label {name!r} is numbers at some sites and text at others, expected one type. "
            "Convert it, or set --data.task at the syncer and at each site."
        )
    classes = {value for label in labels for value in label["classes"]}
    too_many = task is None and not first["stated"] and numeric and len(classes) > MAX_CLASSES
    if len(tasks) > 1 or too_many or tasks == {"regression"}:
        reasons = {label["reason"] for label in labels}
        together = len(reasons) > 1 or tasks != {"regression"}
        reason = "numbers at all sites together" if together else first["reason"]
        return Label(name, "regression", reason=reason)
    ordered = (
        tuple(first["classes"])
        if first["stated"]
        else tuple(sorted(classes, key=float if numeric else str))
    )
    if len(ordered) < 2:
        raise ArgumentError(
            f"The label {name!r} has the class {ordered[0]!r} alone at all sites, expected at "
            "least 2 classes. Choose another --data.label, or wait for more sites."
        )
    return Label(name, "classification", ordered, reason=first["reason"])


LABEL, KIND, CLASSES = "the label", "the kind of the label", "the stated classes of the label"
"""Names of properties."""

NUMBERS = "numbers to predict"
"""The kind of a label for regression."""


def label_properties(description: Mapping[str, Any]) -> dict[str, str]:
    """Return what sites must have in common for `agree_on_label`, in words by name."""
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
        _check(all(map(_is_number_as_text, label.classes)), "classes", label.classes)
    return properties


def table_properties(description: Mapping[str, Any]) -> dict[str, str]:
    """Return what sites must have in common for `agree_on_table`, in words by name."""
    properties, columns = label_properties(description), description["columns"]
    _check(isinstance(columns, list), "columns", columns)
    treatments = {t.name: t for t in map(_checked_treatment, columns)}
    unique = len(treatments) == len(columns) and properties[LABEL] not in treatments
    _check(unique, "columns", [t.name for t in treatments.values()])
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
    fits = _is_text(label.name) and label.bounds is None and label.task in get_args(Task)
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


def check_categories(categories: Any, asked: Sequence[Treatment]) -> None:
    """Raise unless `describe_categories` can return this for some of the columns."""
    _check(isinstance(categories, dict), "categories", categories)
    treatments = {t.name: t for t in asked}
    for name, values in categories.items():
        _check(name in treatments, "categories", name)
        if treatments[name].values is not None:
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


def _is_number_as_text(text: str) -> bool:
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
