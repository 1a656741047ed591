"""Messages about arguments that a function does not take, or that have been donated."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import jax

from fedpax.errors import ArgumentTypeError
from fedpax.primitives.signatures import BY_NAME, POSITIONAL

# Words of other libraries' arguments, and the words of the arguments that they stand for here.
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


def explain_unknown_arguments(names: Iterable[str], namespace: MutableMapping[str, Any]) -> None:
    """Replace functions of a module by the same ones with messages that name their arguments.

    A call with an argument that a function does not take, or with too many by position, raises a
    `TypeError` that lists those which it takes, and the nearest one.

    Example:
        >>> def mean_of(values, *, client_optimizer, cohort_size): ...
        >>> module = {"mean_of": mean_of}
        >>> explain_unknown_arguments(module, module)
        >>> module["mean_of"]([1.0], learning_rate=0.1)
        Traceback (most recent call last):
            ...
        fedpax.errors.ArgumentTypeError: mean_of() takes no argument learning_rate, expected ...
    """
    for name in names:
        if inspect.isfunction(namespace[name]):
            namespace[name] = _explaining(namespace[name])


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
    """Return the argument that an unknown name most likely stands for, or None.

    Example:
        >>> nearest_argument("server_lr", ["cohort_size", "client_optimizer", "server_optimizer"])
        'server_optimizer'
        >>> nearest_argument("max_nrom", ["max_norm", "seed"])
        'max_norm'
    """
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
