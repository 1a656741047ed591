"""Inline calls, so that array code between maps and reductions is at the top level of a jaxpr."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedpax.primitives._jax import ClosedJaxpr, Jaxpr, JaxprEqn, aval_of, read_atom, rebind
from fedpax.primitives.broadcast import federated_broadcast_p, federated_index_p
from fedpax.primitives.jaxpr_analysis import (
    CHECKPOINT_PRIMITIVES,
    all_eqns,
    inner_jaxprs,
    replace_jaxprs,
)
from fedpax.primitives.layout import has_own_shardings
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement, federated_program_p
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.primitives.user_functions import in_source
from fedpax.transforms.marks import draws_noise

# Call primitives that are safe to inline after differentiation -> the parameter with their jaxpr.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "federated_program": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    **dict.fromkeys(CHECKPOINT_PRIMITIVES, "jaxpr"),
}


def is_federated(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr contains a `federated_map`, at any depth."""
    return any(eqn.primitive is federated_map_p for eqn in all_eqns(jaxpr))


def placements_of(jaxpr: Jaxpr) -> list[Placement]:
    """Return the placements of the maps at the top level of a jaxpr."""
    maps = (eqn for eqn in jaxpr.eqns if eqn.primitive is federated_map_p)
    return list(dict.fromkeys(eqn.params["placement"] for eqn in maps))


def program_placements(jaxpr: Jaxpr) -> set[str]:
    """Return the names of the placements that the programs in a jaxpr declare, at any depth."""
    programs = (eqn for eqn in all_eqns(jaxpr) if eqn.primitive is federated_program_p)
    return {placement.name for eqn in programs for placement in eqn.params["placements"]}


def inline(
    closed: ClosedJaxpr,
    inside: Callable[[ClosedJaxpr], ClosedJaxpr],
    keep: Callable[[JaxprEqn], bool] = lambda eqn: False,
    *,
    with_lines: bool = False,
) -> ClosedJaxpr:
    """Inline calls (jit, remat, custom derivatives, programs) with federated or placed values."""
    if not any(map(_is_call_or_nested, closed.jaxpr.eqns)):
        return closed
    run = functools.partial(_run_inlined, closed, inside, keep, with_lines)
    return jax.make_jaxpr(run)(*closed.in_avals)


def _is_call_or_nested(eqn: JaxprEqn) -> bool:
    """Return whether inlining can change an equation."""
    if called_jaxpr(eqn) is not None:
        return True
    return eqn.primitive is not federated_map_p and any(map(is_federated, inner_jaxprs(eqn)))


def _run_inlined(
    closed: ClosedJaxpr,
    inside: Callable[[ClosedJaxpr], ClosedJaxpr],
    keep: Callable[[JaxprEqn], bool],
    with_lines: bool,
    *args: Any,
) -> list:
    # The placed values, by identity. They are kept alive, so that no identity is used twice.
    placed: dict[int, Any] = {}
    # The leading shapes of placed values: the sizes of the placements that have maps.
    maps = (eqn for eqn in all_eqns(closed.jaxpr) if eqn.primitive is federated_map_p)
    sizes = {(eqn.params["placement"].size,) for eqn in maps}

    def run(
        jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], call: JaxprEqn | None = None
    ) -> list:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        for eqn in jaxpr.eqns:
            inputs = [read_atom(v, values) for v in eqn.invars]
            uses_placed = any(id(x) in placed for x in inputs)
            contains_map = any(map(is_federated, inner_jaxprs(eqn)))
            broadcasts = any(aval_of(v).shape[:1] in sizes for v in eqn.outvars)
            body = None if keep(eqn) else called_jaxpr(eqn)
            line_of = call if with_lines and call is not None and not in_source(eqn) else eqn
            is_split = contains_map or uses_placed or broadcasts or draws_noise(eqn)
            if body is not None and is_split:
                outputs = run(body.jaxpr, body.consts, inputs, line_of)
            elif contains_map and eqn.primitive is not federated_map_p:
                params = {k: replace_jaxprs(inside, v) for k, v in eqn.params.items()}
                outputs = rebind(eqn, inputs, params, line_of)
            else:
                outputs = rebind(eqn, inputs, line_of=line_of)
                if eqn.primitive in (federated_map_p, federated_broadcast_p, federated_index_p):
                    uses_placed = True
                if uses_placed and eqn.primitive not in REDUCTIONS:
                    placed.update((id(x), x) for x in outputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read_atom(v, values) for v in jaxpr.outvars]

    return run(closed.jaxpr, closed.consts, args)


def called_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr of an equation that is a call without shardings of its own."""
    if eqn.primitive.name not in CALLS or has_own_shardings(eqn):
        return None
    body = eqn.params[CALLS[eqn.primitive.name]]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
