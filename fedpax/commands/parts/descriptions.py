"""Descriptions of an experiment's fields for `--help`, with their sentences in one piece."""

import dataclasses
import re

from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)


def whole_sentences() -> ConstructorRegistry:
    """Make the rules by which tyro describes fields: only a blank line ends a paragraph.

    By itself, tyro also begins a new line of `--help` at each line of a docstring that begins with
    a quote, a backtick or a digit.
    """
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
        return text and join_lines(text)

    return dataclasses.replace(field, helptext=describe)


def join_lines(text: str) -> str:
    r"""Join the lines of each paragraph.

    Example:
        >>> join_lines("The loss, such as\n`mean`.\n\nDefault: none.")
        'The loss, such as `mean`.\n\nDefault: none.'
    """
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)
