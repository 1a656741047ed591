"""Mixtures of data sets on the command line: one text for each data set."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from fedpax.data.rounds.mixture import Weight, check_weights
from fedpax.errors import ArgumentError
from fedpax.user_files.formats import FILE_NAME

_ITEM = re.compile(rf"(?P<name>[^#=]+|{FILE_NAME})(#(?P<field>[^#=/]+))?=(?P<weight>[^#=]+)")
_REMEDY = "Write NAME=WEIGHT, NAME#FIELD=WEIGHT or NAME=WEIGHT@ROUND,WEIGHT@ROUND,..."


class MixtureItem(NamedTuple):
    """One data set of a mixture."""

    name: str  # a name for `fedpax.data.load`
    weight: Weight
    field: str | None  # the field with its text. None: the configuration's.


def parse_mixture(items: Sequence[str]) -> list[MixtureItem]:
    """Parse the data sets of a mixture."""
    parsed: dict[str, MixtureItem] = {}
    for text in items:
        match = _ITEM.fullmatch(text.strip())
        if match is None or not match["name"].strip():
            raise ArgumentError(f"data.mixture has {text!r}, which names no data set. {_REMEDY}.")
        name = match["name"].strip()
        if name in parsed:
            raise ArgumentError(f"data.mixture names {name!r} twice: add its weights up.")
        parsed[name] = MixtureItem(name, _parse_weight(text, match["weight"]), match["field"])
    if parsed:
        try:
            check_weights({name: item.weight for name, item in parsed.items()})
        except ValueError as error:
            raise ArgumentError(f"data.mixture={tuple(items)}: {error}") from error
    return list(parsed.values())


def _parse_weight(item: str, text: str) -> Weight:
    points = [point.partition("@") for point in text.split(",")]
    try:
        if len(points) == 1 and not points[0][1]:
            return float(text)
        return tuple((int(round_number), float(weight)) for weight, _, round_number in points)
    except ValueError:
        raise ArgumentError(
            f"data.mixture has {item!r}, whose weight {text!r} is not a number. {_REMEDY}."
        ) from None
