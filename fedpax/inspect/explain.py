"""A text report on how the streaming pass runs a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

from fedpax.primitives._jax import ClosedJaxpr, Jaxpr, JaxprEqn, aval_of, eliminate_dead_code
from fedpax.primitives.jaxpr_analysis import inner_jaxprs
from fedpax.primitives.layout import describe_axis, find_mesh
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import federated_program_p
from fedpax.transforms.inlining import inline, is_federated, placements_of
from fedpax.transforms.placed_closures import placed_closures
from fedpax.transforms.planner import make_plan
from fedpax.transforms.store_access import RowAccess
from fedpax.transforms.streaming import plan_row_accesses


def explain(program: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Describe the loops of a program, and list the values stored for all participants.

    A value that is not listed exists for one chunk of participants at a time.

    Args:
        program: a function decorated with `fedpax.program`, or one that calls such functions.
        *args: the arguments of `program`: arrays, or `jax.ShapeDtypeStruct`s.
        **kwargs: the keyword arguments of `program`; likewise.

    Returns:
        One line per program. With a mesh, one line per placement follows: the mesh axis that shards
        its participants. Then one line per placement and phase with a loop, a line for each stored
        value, with its type and the reason, and for each state of clients in a store's rows. Last,
        a line for each placed value that a mapped function closes over.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=4, chunk_size=1)
        ... def mean_square(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: (w - x) ** 2, x))
        >>> print(fedpax.explain(mean_square, 1.0, jnp.zeros((4, 3))))
        program mean_square
          clients=4, phase 0: 1 map, 1 reduction, chunk_size=1; nothing is stored.
    """
    closed = jax.make_jaxpr(program)(*args, **kwargs)
    mesh = find_mesh(closed.in_avals)
    lines = [line for eqn in _programs(closed.jaxpr) for line in _explain_program(eqn, mesh)]
    return "\n".join(lines) or "This function calls no fedpax program."


def _programs(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is federated_program_p:
            yield eqn
            continue
        for inner in inner_jaxprs(eqn):
            yield from _programs(inner)


def _explain_program(eqn: JaxprEqn, mesh: AbstractMesh) -> Iterator[str]:
    yield f"program {eqn.params['name']}"
    for placement in eqn.params["placements"]:
        if where := describe_axis(placement.name, mesh):
            yield f"  {placement.name}: {where}."
    yield from (f"  {line}" for line in _explain_jaxpr(eqn.params["jaxpr"]))
    for closure in placed_closures(eqn.params["jaxpr"], eqn.params["placements"]):
        yield f"  {closure.describe()}."


def _explain_jaxpr(closed: ClosedJaxpr) -> Iterator[str]:
    with_rows, accesses = None, list[RowAccess]()
    if (planned := plan_row_accesses(closed, inside=lambda inner: inner)) is not None:
        with_rows, closed, accesses = planned
    else:
        closed = eliminate_dead_code(inline(closed, inside=lambda inner: inner))
    if not is_federated(closed.jaxpr):
        yield "It has no federated_map, so there is no loop over participants."
    for placement in placements_of(closed.jaxpr):
        plan = with_rows or make_plan(closed.jaxpr, placement)
        for number, phase in enumerate(sorted(plan.loops)):
            rows = {v for a in accesses if a.phase == phase for _, v, _ in a.values}
            stored = {v: why for v, why in plan.stored[phase].items() if v not in rows}
            kept, rematerialized = plan.maps(phase)
            parts = [_count(len(kept), "map")] if kept or not rematerialized else []
            if rematerialized:
                parts.append(_count(len(rematerialized), "rematerialized map"))
            parts.append(_count(len(plan.reductions.get(phase, ())), "reduction"))
            parts.append(f"chunk_size={plan.chunk_size(phase)!r}")
            yield (
                f"{placement}, phase {number}: {', '.join(parts)}; "
                + ("stored for all participants:" if stored else "nothing is stored.")
            )
            yield from (f"  {aval_of(v).str_short()}: {why}" for v, why in stored.items())
            for v in plan.stored[phase]:
                if v in rows:
                    yield f"  {aval_of(v).str_short()}: read and written in the rows of a store."
            for eqn in (*kept, *rematerialized):
                if is_federated(eqn.params["jaxpr"].jaxpr):
                    yield f"  in each of the {placement.name}:"
                    yield from (f"    {line}" for line in _explain_jaxpr(eqn.params["jaxpr"]))
    for eqn in closed.jaxpr.eqns:
        for where, inner in _control_flow(eqn):
            if is_federated(inner.jaxpr):
                yield f"{where}:"
                yield from (f"  {line}" for line in _explain_jaxpr(inner))


def _control_flow(eqn: JaxprEqn) -> Iterator[tuple[str, ClosedJaxpr]]:
    """Yield the bodies of a loop or conditional, which are streamed separately, with a heading."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            yield f"in a loop of {_count(params['length'], 'step')}", params["jaxpr"]
        case "while":
            yield "in a while loop", params["body_jaxpr"]
            yield "in the condition of a while loop", params["cond_jaxpr"]
        case "cond":
            for i, branch in enumerate(params["branches"]):
                yield f"in branch {i} of a conditional", branch
        case name if eqn.primitive is not federated_map_p:
            for inner in inner_jaxprs(eqn):
                yield f"in {name!r}", ClosedJaxpr(inner, ())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
