"""Descriptions of an experiment's fields for `--help`, and lists of columns in flags."""

import ast
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from fedpax.comma_lists import split_names, split_treatments

# The end of a field's text, such as "Default 1." or "Default None: no limit."
_DEFAULT = re.compile(r"(?:^| )Default (None|True|False|\(\)|-?\d[\w.-]*?)(:|\.(?=\s|$))")


def whole_sentences() -> ConstructorRegistry:
    """Make the rules by which tyro describes fields: only a blank line ends a paragraph."""
    registry = ConstructorRegistry()
    describing = False

    @registry.struct_rule
    def describe(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal describing
        if describing:
            return None  # tyro's own rules apply
        describing = True
        try:
            spec = registry.get_struct_spec(info)
        finally:
            describing = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        return dataclasses.replace(spec, fields=tuple(map(_join_description, spec.fields)))

    return registry


def _join_description(field: StructFieldSpec) -> StructFieldSpec:
    def describe() -> str | None:
        text = field.helptext() if callable(field.helptext) else field.helptext
        return text and _without_other_default(join_lines(text), field.default)

    return dataclasses.replace(field, helptext=describe)


def _without_other_default(text: str, default: Any) -> str:
    """Leave out the default of the class, if the experiment sets another one; keep its meaning."""

    def keep(stated: re.Match[str]) -> str:
        if ast.literal_eval(stated[1]) == default:
            return stated[0]
        return f" {stated[1]}:" if stated[2] == ":" else ""

    return _DEFAULT.sub(keep, text).strip()


def join_lines(text: str) -> str:
    """Join the lines of each paragraph."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


# Lists of columns among the fields of an experiment, which take commas as flags of files do.
_LISTS = {
    "data.optional_columns": split_names,
    "data.types": split_names,
    "data.columns": split_treatments,
}


def split_columns(words: Sequence[str]) -> list[str]:
    """Divide lists of columns at their commas, for tyro, which divides values at spaces."""
    divided, split = list[str](), None
    for word in words:
        if not word.startswith("--"):
            divided += split(word) if split else [word]
            continue
        flag, equals, text = word.partition("=")
        split = _LISTS.get(flag[2:].replace("-", "_"))
        names = split(text) if split and equals else [text]
        # One value stays behind "=", since it can begin with a dash.
        divided += [flag + equals + names[0]] if len(names) == 1 else [flag, *names]
    return divided
