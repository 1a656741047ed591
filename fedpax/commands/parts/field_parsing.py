"""The fields of an experiment on the command line: their parsing by tyro, and their `--help`."""

import ast
import contextlib
import copy
import dataclasses
import functools
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from fedpax.comma_lists import split_names, split_treatments
from fedpax.console import escape_controls
from fedpax.training.experiment import Experiment

_PARSING = threading.Lock()

# The end of a field's text, such as "Default 1." or "Default None: no limit."
_DEFAULT = re.compile(r"(?:^| )Default (None|True|False|\(\)|-?\d[\w.-]*?)(:|\.(?=\s|$))")


def parse_fields(default: Experiment, fields: Sequence[str], prog: str, text: str) -> Experiment:
    """Parse the arguments for the fields of an experiment by tyro."""
    parse = functools.partial(
        tyro.cli,
        type(default),
        args=fields,
        prog=prog,
        description=escape_controls(text, keep="\n"),
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        registry=_whole_sentences(),
    )
    # tyro prints the fields' values, which a folder of others can have set.
    shown = _escape_texts(default)
    with _PARSING, _colors_on_terminals_alone():  # all threads have its registries and `TERM`
        try:
            return parse(default=default, console_outputs=shown == default)
        except SystemExit:
            if shown == default:
                raise
            return parse(default=shown)


def _escape_texts(value: Any) -> Any:
    """Escape the control characters of all texts in a configuration, to print it."""
    if isinstance(value, str):
        return escape_controls(value)
    if isinstance(value, tuple):
        return tuple(_escape_texts(item) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = [field.name for field in dataclasses.fields(value)]
    return with_fields(value, {name: _escape_texts(getattr(value, name)) for name in names})


def with_fields(value: Any, changes: Mapping[str, Any]) -> Any:
    """Replace fields of a frozen dataclass without the checks of a new object."""
    changed = copy.copy(value)
    for name, item in changes.items():
        object.__setattr__(changed, name, item)
    return changed


@contextlib.contextmanager
def _colors_on_terminals_alone() -> Iterator[None]:
    """Let tyro print no colors if `NO_COLOR` is set or stderr is no terminal."""
    # tyro itself looks at stdout alone, and at `TERM`.
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        yield
        return
    former = os.environ.get("TERM")
    os.environ["TERM"] = "dumb"
    try:
        yield
    finally:
        del os.environ["TERM"]
        if former is not None:
            os.environ["TERM"] = former


def _whole_sentences() -> ConstructorRegistry:
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


def _split_size(text: str) -> list[str]:
    return re.split("[x,]", text)


# Fields of an experiment that take lists of columns and sizes as the flags of `fedpax data` do.
_LISTS = {
    "data.image_size": _split_size,
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
