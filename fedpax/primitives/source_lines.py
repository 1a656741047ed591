"""The lines of the user's source that equations are from, for messages."""

import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from fedpax.primitives._jax import Jaxpr, JaxprEqn, aval_of, rebind
from fedpax.primitives.jaxpr_analysis import inner_jaxprs


def in_source(eqn: JaxprEqn) -> str:
    """Return the line of the user's source that an equation is from, as " (file.py:12)", or ""."""
    traceback = eqn.source_info.traceback
    frames: Sequence[Any] = traceback.frames if traceback is not None else ()
    return _user_line((frame.file_name, frame.line_num) for frame in frames)


def callbacks(jaxpr: Jaxpr) -> dict[str, str]:
    """Return the callbacks into Python of a jaxpr, each with the line of its first use, or ""."""

    def find(eqn: JaxprEqn) -> list[str]:
        name = eqn.primitive.name
        return [name] if "callback" in name or name == "debug_print" else []

    return _first_uses(jaxpr, find)


def lines_of_custom_calls(jaxpr: Jaxpr, platforms: Sequence[str]) -> dict[str, str]:
    """Return the custom calls of a jaxpr, each with the line of its first use, or "".

    JAX lowers some operations into functions without lines, so each equation is lowered alone.
    """
    lowered: set[Any] = set()

    def find(eqn: JaxprEqn) -> list[str]:
        avals = [aval_of(v) for v in eqn.invars]
        key = (eqn.primitive, *map(str, avals))
        if key in lowered:
            return []
        lowered.add(key)
        traced = jax.jit(lambda *args: rebind(eqn, args)).trace(*avals)
        text = traced.lower(lowering_platforms=tuple(platforms)).as_text()
        return re.findall(r"stablehlo\.custom_call @([\w.$-]+)", text)

    return _first_uses(jaxpr, find)


def _first_uses(jaxpr: Jaxpr, find: Callable[[JaxprEqn], list[str]]) -> dict[str, str]:
    """Return what `find` finds in equations without inner jaxprs, each with its line."""
    first_lines: dict[str, str] = {}
    for eqn in jaxpr.eqns:
        inner = inner_jaxprs(eqn)
        uses = {} if inner else dict.fromkeys(find(eqn), "")
        for each in inner:
            uses = _first_uses(each, find) | uses
        for what, line in uses.items():  # functions of JAX are traced once, without a caller
            first_lines.setdefault(what, line or in_source(eqn))
    return first_lines


def _user_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line outside of libraries; without one, that outside of JAX."""
    outside = [(name, line) for name, line in frames if not name.startswith(_LIBRARIES[:2])]
    own = (pair for pair in outside if not pair[0].startswith(_LIBRARIES))
    name, line = next(own, outside[0] if outside else ("", 0))
    return f" ({os.path.basename(name)}:{line})" if name else ""


# JAX and Python, then fedpax and other installed packages.
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(jax.__file__),
        sysconfig.get_path("stdlib"),
        os.path.dirname(os.path.dirname(__file__)),
        os.path.dirname(os.path.dirname(jax.__file__)),
    )
)
