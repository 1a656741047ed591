"""The label of a table: classes, or a standardized number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Num

from fedpax.console import count_of
from fedpax.data.tables.treatments import (
    Treatment,
    count_distinct,
    describe_count,
    parse_treatment,
    with_tuples,
)
from fedpax.data.tables.values import (
    arrow_column,
    arrow_pieces,
    encode_texts,
    is_date,
    is_missing,
    is_number,
    numbers,
)
from fedpax.errors import ArgumentError

Task: TypeAlias = Literal["regression", "classification"]

MAX_CLASSES = 20
"""An integer label with more distinct values is a number to predict, unless the task is stated."""


@dataclasses.dataclass(frozen=True)
class Label:
    """The label of a table.

    Attributes:
        name: the column.
        task: what is predicted.
        classes: the classes in order, as texts; () for regression.
        mean: the mean of the label in the training examples; 0 for classification.
        scale: its standard deviation; 1 for classification.
        reason: why this task: "stated", or the rule that applied.
        bounds: the stated range of a number, to which it is clipped.
    """

    name: str
    task: Task
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0
    reason: str = "stated"
    bounds: tuple[float, float] | None = None

    @property
    def num_outputs(self) -> int:
        """The number of outputs of a model: the classes, or 1."""
        return len(self.classes) or 1

    def encode(self, values: Any) -> Num[np.ndarray, " examples"]:
        """Return the numbers of classes, int32, or the standardized labels, float32, of values.

        Raises:
            ValueError: a value is missing, not one of the classes, or not finite.
        """
        column = arrow_column(values)
        if is_missing(column).any():
            raise ArgumentError(missing_label_message(self.name, is_missing(column)))
        if self.task == "regression":
            values = numbers(column)
            if self.bounds is not None:
                values = np.clip(values, *self.bounds)
            with np.errstate(over="ignore"):
                scaled = ((values - self.mean) / self.scale).astype(np.float32)
            if not np.isfinite(scaled).all():
                first = int(np.argmin(np.isfinite(scaled)))
                raise ArgumentError(
                    f"The label {self.name!r} is {values[first]:g} in example {first}, expected "
                    "finite numbers that float32 holds. Correct it."
                )
            return scaled
        places = {name: place for place, name in enumerate(self.classes)}
        distinct, codes = encode_texts(column)
        if unknown := sorted(set(distinct) - places.keys()):
            raise ArgumentError(
                f"The label {self.name!r} has the value {unknown[0]!r}, expected one of "
                f"{', '.join(map(repr, self.classes))}. Correct it, or state all classes: "
                f"--data.columns '{self.name}=category(A|B)'."
            )
        return np.array([places[value] for value in distinct], np.int32)[codes]

    def describe(self) -> str:
        """Return a line that tells the classes, or the mean and deviation of numbers."""
        if self.task == "regression":
            text = f"regression (mean {self.mean:.6g}, deviation {self.scale:.6g})"
        else:
            shown = [name if name == name.strip() else repr(name) for name in self.classes[:10]]
            text = f"classification, {', '.join(shown)}"
            text += ", ..." if len(self.classes) > 10 else ""
        return f"label {self.name!r}: {text}; {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return the label as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Label:
        """Make the label from the values of `to_json`."""
        return cls(**with_tuples(fields))


def missing_label_message(
    name: str, missing: Bool[np.ndarray, " examples"], whose: str = ""
) -> str:
    """Return the message for labels without a value."""
    return (
        f"The label {name!r} has no value in {int(missing.sum()):,} of {len(missing):,} examples, "
        f"the first of them example {int(np.argmax(missing))}{whose}. Fill them in, or set "
        "--data.missing_label=skip to leave these examples out."
    )


def infer_label(
    name: str,
    values: Any,
    task: Task | None = None,
    stated: str = "",
    *,
    min_classes: int = 2,
) -> Label:
    """Return the label's task and classes.

    Where the task is not stated, text, booleans, and integers of at most 20 distinct values are
    classes; for other numbers it is regression: set their mean and deviation, from
    `fedpax.data.tables.federated_moments`, with `dataclasses.replace`.

    Classes that are not stated are those of all clients, held-out ones too: each client discloses
    which it has.

    Args:
        name: the column.
        values: its values in all examples.
        task: the task. Default None: by the rule.
        stated: the classes, as `parse_treatment` takes them: "NAME=category(A|B)". Default "": the
            distinct values, in numerical or alphabetical order.
        min_classes: the least number of classes.

    Raises:
        ValueError: the label cannot be predicted: text for regression, dates, lists, or fewer than
            `min_classes` classes.

    Example:
        >>> infer_label("outcome", ["well", "ill", "well"]).classes
        ('ill', 'well')
    """
    pieces = arrow_pieces(values)
    dtype = pieces[0].type
    treatment = parse_treatment(stated) if stated else None
    task, reason = (task, "stated") if task else _infer_task(name, pieces, treatment)
    if task == "regression":
        if not is_number(dtype):
            raise ArgumentError(
                f"The label {name!r} has values of type {dtype}, expected numbers for "
                "--data.task=regression. Set --data.task=classification, or convert them."
            )
        return Label(name, task, reason=reason)
    if treatment is not None and treatment.values is not None:
        classes = treatment.values
    else:
        try:
            texts = {text for piece in pieces for text in encode_texts(piece)[0]}
        except NOT_A_LABEL as error:
            raise _no_label(name, dtype) from error
        classes = tuple(sorted(texts, key=float if is_number(dtype) else str))
    if len(classes) < min_classes:
        raise ArgumentError(
            f"The label {name!r} has {count_of(len(classes), 'distinct value')}, expected at least "
            f"{min_classes} classes. Choose another --data.label, or add the files of the clients "
            "that have other classes."
        )
    return Label(name, task, classes, reason=reason)


def _infer_task(name: str, pieces: Sequence[Any], treatment: Treatment | None) -> tuple[Task, str]:
    if treatment is not None:
        if treatment.kind not in ("category", "boolean", "number"):
            raise ArgumentError(
                f"data.columns states {name}={treatment.kind}, but {name} is the label, expected "
                "category or number."
            )
        return ("regression" if treatment.kind == "number" else "classification"), "stated"
    dtype = str(pieces[0].type)
    if dtype == "bool":
        return "classification", "booleans"
    if is_number(pieces[0].type):
        whole = all(
            np.all(np.isnan(values) | (values == np.round(values)))
            for values in map(numbers, pieces)
        )
        distinct = count_distinct(*pieces)
        words = (
            f"{'whole ' if whole else ''}numbers with {describe_count(distinct)} distinct values"
        )
        if whole and distinct <= MAX_CLASSES:
            return "classification", words
        return "regression", words
    try:
        if is_date(pieces[0].type):
            raise TypeError
        encode_texts(pieces[0])
    except NOT_A_LABEL as error:
        raise _no_label(name, dtype) from error
    return "classification", "text"


NOT_A_LABEL = (NotImplementedError, TypeError, ValueError)


def _no_label(name: str, dtype: Any) -> ArgumentError:
    return ArgumentError(
        f"The label {name!r} has values of type {dtype}, expected numbers, booleans or text. "
        "Choose another --data.label, or convert it."
    )
