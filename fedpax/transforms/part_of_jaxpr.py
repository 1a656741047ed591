"""The equations of a jaxpr that compute some of its values from others."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from fedpax.primitives._jax import ClosedJaxpr, JaxprEqn, Var, read_atom, rebind
from fedpax.transforms.streaming_plan import Atom


def needed(
    closed: ClosedJaxpr,
    outputs: Iterable[Atom],
    known: Container[Var],
    *,
    with_effects: bool = False,
) -> tuple[list[JaxprEqn], set[Var]]:
    """Return the equations that compute values from known ones, and the arguments they need.

    With `with_effects`, equations with effects, such as callbacks, are among them, even if nothing
    reads their results.
    """
    wanted = {v for v in outputs if isinstance(v, Var) and v not in known}
    eqns = []
    for eqn in reversed(closed.jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars) and not (with_effects and eqn.effects):
            continue
        eqns.append(eqn)
        wanted.update(v for v in eqn.invars if isinstance(v, Var) and v not in known)
    return eqns[::-1], wanted.intersection(closed.jaxpr.invars)


def evaluate_from(
    closed: ClosedJaxpr, known: Mapping[Var, Any], outputs: Iterable[Atom]
) -> list[Any]:
    """Compute values of a jaxpr from known ones."""
    outputs = list(outputs)
    eqns, _ = needed(closed, outputs, known)
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | dict(known)
    for eqn in eqns:
        results = rebind(eqn, [read_atom(v, values) for v in eqn.invars])
        values |= {v: x for v, x in zip(eqn.outvars, results, strict=True) if v not in values}
    return [read_atom(v, values) for v in outputs]
