"""Users' functions in messages: their arguments, their names, and their lines."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.lazy_names import public_names
from fedpax.primitives._jax import Jaxpr, JaxprEqn, aval_of, rebind
from fedpax.primitives.jaxpr_analysis import inner_jaxprs

# Words of other libraries' arguments -> the words here.
SYNONYMS = {
    "clients": ("cohort", "islands"),
    "clip": ("norm",),
    "eta": ("optimizer",),
    "iterations": ("steps",),
    "learning": ("optimizer",),
    "local": ("client", "inner"),
    "lr": ("optimizer", "learning"),
    "num": ("size",),
    "opt": ("optimizer",),
    "participants": ("cohort", "islands"),
    "rate": ("optimizer",),
    "sigma": ("noise", "stddev"),
    "std": ("stddev",),
    "workers": ("islands", "cohort"),
}


def explained_names(namespace: MutableMapping[str, Any]) -> list[str]:
    """Return the public names of a package, whose functions now explain unknown arguments."""
    names = public_names(namespace)
    for name in names:
        if inspect.isfunction(namespace[name]):
            namespace[name] = _explaining(namespace[name])
    return names


def _explaining(fn: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(fn)
    parameters = signature.parameters.values()
    known = [p.name for p in parameters if p.kind in BY_NAME]
    positions = [p.name for p in parameters if p.kind in POSITIONAL]
    is_open = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        unknown = [] if is_open else [name for name in kwargs if name not in known]
        if unknown:
            near = nearest_argument(unknown[0], [name for name in known if name not in kwargs])
            raise ArgumentTypeError(
                f"{fn.__name__}() takes no argument {', '.join(unknown)}, expected "
                f"{', '.join(known) or 'none'}." + (f" Did you mean {near}?" if near else "")
            )
        if len(args) > len(positions) and not is_open:
            named = [f"{name}=" for name in known if name not in positions]
            raise ArgumentTypeError(
                f"{fn.__name__}() takes {len(positions)} arguments by position, but {len(args)} "
                f"were given. Name all others: {', '.join(named) or 'there are none'}."
            )
        return fn(*args, **kwargs)

    return call


def nearest_argument(unknown: str, known: list[str]) -> str | None:
    """Return the argument that an unknown name most likely stands for, or None."""
    own = unknown.lower().split("_")
    words = {*own, *(meant for word in own for meant in SYNONYMS.get(word, ()))}

    def shared(name: str) -> int:
        return len(words.intersection(name.split("_")))

    best = max(known, key=shared, default=None)
    if best is not None and shared(best):
        return best
    return next(iter(difflib.get_close_matches(unknown, known, n=1)), None)


def check_not_deleted(value: Any, name: str) -> None:
    """Raise a RuntimeError if a value is an array that was donated to an earlier call."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return
    if value.is_deleted():
        raise RuntimeError(
            f"{name} has been deleted: it was donated to an earlier call, as with "
            "jax.jit(..., donate_argnums=0). If that call was interrupted, its result is lost: "
            "restore the state from a checkpoint, or make it anew with init. To continue after an "
            "interruption, do not donate the state, or keep a copy: "
            "jax.tree.map(jnp.copy, state)."
        )


def check_tree_not_deleted(tree: Any, name: str) -> None:
    """Raise a RuntimeError if a leaf of a pytree was donated to an earlier call."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        check_not_deleted(leaf, f"{name}{jax.tree_util.keystr(path)}")


# ---- signatures of users' functions: their static arguments, and names for messages

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class StaticArguments(NamedTuple):
    """The static arguments of a function, which are Python values and are never traced."""

    argnums: tuple[int, ...] = ()  # positions of those that are passed by position
    argnames: tuple[str, ...] = ()  # names of those that are passed by keyword


NO_STATIC_ARGUMENTS = StaticArguments()


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return a function's signature, or None for a built-in function that has none."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function, of a partial application, or of a callable's class."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def resolve_static(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] | None,
    argnames: str | Iterable[str] | None,
) -> StaticArguments:
    """Check a declaration of static arguments as `jax.jit` has it, and complete it."""
    # If only positions or only names are given, the signature gives the others.
    signature, name = signature_of(fn), function_name(fn)
    parameters = list(signature.parameters.values()) if signature else []
    positional = [p.name for p in parameters if p.kind in POSITIONAL]
    any_position = signature is None or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    any_name = signature is None or any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = _as_names(argnames)
    numbers = []
    for number in _as_numbers(argnums):
        position = number + len(positional) if number < 0 else number
        if position < 0 or (position >= len(positional) and not any_position):
            raise ArgumentError(
                f"static_argnums={number}, but {name}() takes {len(positional)} arguments by "
                "position. Pass the positions of arguments that it takes, counted from 0."
            )
        numbers.append(position)
    known = [p.name for p in parameters if p.kind in BY_NAME]
    for argname in names:
        if argname not in known and not any_name:
            raise ArgumentError(
                f"static_argnames={argname!r}, but {name}() has no argument of that name; its "
                f"arguments are {', '.join(known) or 'none'}. Pass names of these."
            )
    if argnums is None:
        numbers = [i for i, parameter in enumerate(positional) if parameter in names]
    if argnames is None:
        names = [p for i, p in enumerate(positional) if i in numbers]
    return StaticArguments(tuple(numbers), tuple(names))


def _as_numbers(argnums: Any) -> list[int]:
    if argnums is None:
        return []
    try:
        return [operator.index(argnums)]
    except TypeError:
        pass
    try:
        return [operator.index(i) for i in argnums]
    except TypeError:
        raise ArgumentTypeError(
            f"static_argnums={argnums!r}, expected an int or a sequence of ints. Pass for example "
            "static_argnums=2, or name the arguments with static_argnames."
        ) from None


def _as_names(argnames: Any) -> list[str]:
    if argnames is None:
        return []
    names = [argnames]
    if not isinstance(argnames, str) and isinstance(argnames, Iterable):
        names = [*argnames]
    if not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"static_argnames={argnames!r}, expected a string or a sequence of strings. Pass for "
            "example static_argnames=('mode',)."
        )
    return names


def split_static(
    static: StaticArguments, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], Callable[..., tuple[list[Any], dict[str, Any]]]]:
    """Separate traced from static arguments; return also the function that joins them again."""
    fixed = {i: args[i] for i in static.argnums if i < len(args)}
    fixed_by_name = {k: v for k, v in kwargs.items() if k in static.argnames}

    def merge(*traced: Any, **traced_by_name: Any) -> tuple[list[Any], dict[str, Any]]:
        rest = iter(traced)
        merged = [fixed[i] if i in fixed else next(rest) for i in range(len(args))]
        return merged, traced_by_name | fixed_by_name

    traced = [x for i, x in enumerate(args) if i not in fixed]
    return traced, {k: v for k, v in kwargs.items() if k not in fixed_by_name}, merge


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a function's first `count` positional arguments, for messages."""
    signature = signature_of(fn)
    parameters = list(signature.parameters.values()) if signature else []
    names = [p.name for p in parameters if p.kind in POSITIONAL][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    first = len(names) if rest else 0
    return [*names, *(f"{rest or 'args'}[{i - first}]" for i in range(len(names), count))]


def named_like(
    fn: Callable[..., Any], run: Callable[..., Any], static: StaticArguments = NO_STATIC_ARGUMENTS
) -> Callable[..., Any]:
    """Copy the name, source line and argument names of a user's function, for JAX's messages."""
    signature = signature_of(fn)
    functools.update_wrapper(run, fn, updated=())
    source = fn
    while isinstance(source, functools.partial):
        source = source.func
    if not hasattr(source, "__code__") and not hasattr(source, "__wrapped__"):
        source = type(source).__call__  # an object with a method __call__
    run.__wrapped__ = source  # type: ignore[attr-defined]  # for JAX and inspect
    run.__name__ = function_name(fn)
    if signature is not None:
        parameters = [
            p
            for i, p in enumerate(signature.parameters.values())
            if i not in static.argnums and p.name not in static.argnames
        ]
        signature = signature.replace(parameters=parameters)
        run.__signature__ = signature  # type: ignore[attr-defined]  # for JAX and inspect
    return run


# ---- the lines of the user's source that equations are from, for messages


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
    """Return the custom calls of a jaxpr, each with the line of its first use, or ""."""
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
    of_user = (pair for pair in outside if not pair[0].startswith(_LIBRARIES))
    name, line = next(of_user, outside[0] if outside else ("", 0))
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
