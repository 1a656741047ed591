"""Placed values that mapped functions close over, so that each participant reads all of them."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    argument_names,
    eliminate_dead_code,
    result_names,
)
from fedpax.primitives.jaxpr_analysis import inner_jaxprs
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.primitives.user_functions import function_name
from fedpax.transforms.inlining import inline
from fedpax.transforms.placed_values import PlacedValues
from fedpax.transforms.value_names import Names, type_of


class PlacedClosureWarning(UserWarning):
    """A mapped function closes over a placed value: each participant reads the values of all."""


class PlacedClosure(NamedTuple):
    """A placed value that a mapped function closes over."""

    value: str
    type: str
    function: str
    placement: Placement

    def describe(self) -> str:
        """Return a sentence without its full stop."""
        computed = "a value " if self.value.startswith("computed from") else ""
        return (
            f"{self.function}() closes over {computed}{self.value}, {self.type}, the values of all "
            f"{self.placement.name}"
        )


def placed_closures(program: ClosedJaxpr, placements: Iterable[Placement]) -> list[PlacedClosure]:
    """Find the placed values that the mapped functions of a program close over."""
    closed = eliminate_dead_code(inline(program, inside=lambda inner: inner))
    names = argument_names(program)
    arguments = {
        v: [(name, type_of(v))] for v, name in zip(closed.jaxpr.invars, names, strict=False)
    }
    closures = [
        closure
        for placement in placements
        for closure in _closures(
            PlacedValues(closed.jaxpr, placement), Names(closed.jaxpr, arguments)
        )
    ]
    return list(dict.fromkeys(closures))


def _closures(values: PlacedValues, names: Names) -> Iterator[PlacedClosure]:
    maps = [eqn for eqn in values.jaxpr.eqns if eqn.primitive is federated_map_p]
    plan = values.plan
    in_rows = {
        v
        for unstacked in plan.producer.values()
        for v, axis in zip(plan.operands(unstacked.eqn), unstacked.axes.operands, strict=True)
        if axis == 0
    }
    for eqn in values.jaxpr.eqns:
        closes = "closed_over" in eqn.params and eqn.params["placement"] == values.placement
        if closes and (values.axis_of(value := eqn.invars[0]) == 0 or value in in_rows):
            for function in _readers(eqn.outvars[0], maps):
                yield PlacedClosure(names.of(value), type_of(value), function, values.placement)
        for body in values.uses[id(eqn)].bodies:
            yield from _closures(body, Names(body.jaxpr, {}))


def _readers(v: Var, maps: list[JaxprEqn]) -> Iterator[str]:
    """Yield the names of the mapped functions that take a value."""
    for eqn in maps:
        if v in eqn.invars:
            yield result_names(eqn.params["jaxpr"])[0].partition("[")[0]


_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_of_placed_closures(
    fn: Callable[..., Any], program: ClosedJaxpr, placements: Sequence[Placement]
) -> None:
    """Warn if a mapped function closes over a placed value, once per source of a program."""
    if not _marks_closure(program.jaxpr):
        return
    source: Any = fn
    while isinstance(source, functools.partial):
        source = source.func
    source = getattr(source, "__code__", type(source))
    if source in _warned:
        return
    closures = placed_closures(program, placements)
    if not closures:
        return
    _warned.add(source)
    texts = "; ".join(closure.describe() for closure in closures)
    warnings.warn(
        f"program {function_name(fn)}: {texts}. Each participant reads the values of all others. "
        "Pass the value to federated_map() as an argument, or pass federated_broadcast(value) if "
        "every participant is to read it.",
        PlacedClosureWarning,
        stacklevel=levels_to_user(),
    )


def _marks_closure(jaxpr: Jaxpr) -> bool:
    """Return whether a closure has the shape of a placed value, outside of mapped functions."""
    return any(
        "closed_over" in eqn.params
        or (eqn.primitive is not federated_map_p and any(map(_marks_closure, inner_jaxprs(eqn))))
        for eqn in jaxpr.eqns
    )


def levels_to_user() -> int:
    """Return the stack level of the innermost caller outside of fedpax and JAX."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("fedpax", "jax", "contextlib", "functools"):
            break
        frame, level = frame.f_back, level + 1
    return level
