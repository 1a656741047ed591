"""The values that participants send in place of their updates, and those that they keep."""

from collections.abc import Iterable
from typing import NamedTuple

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Var, aval_of
from fedpax.primitives.jaxpr_analysis import SHAPE_PRIMITIVES, inner_jaxprs, num_bytes
from fedpax.primitives.map import federated_map_p
from fedpax.transforms.marks import KEPT, SENT, SERVER, has_mark, is_mark
from fedpax.transforms.placed_values import PlacedValues
from fedpax.transforms.streaming_plan import StreamingPlan


class Sent(NamedTuple):
    """A value that a participant sends.

    `before` is the bytes of the update that it replaces, counted once for all values that replace
    it.
    """

    map: int
    position: int
    type: str
    num_bytes: int
    before: int
    executions: int


def sent_by_results(placed: PlacedValues) -> dict[Var, tuple[Sent, ...]]:
    """Return the sent values that each placed value is computed from."""
    sent_of: dict[Var, tuple[Sent, ...]] = {}
    for eqn in placed.jaxpr.eqns:
        if not any(v in placed.axes for v in eqn.outvars):
            continue
        values = placed.plan.operands(eqn)
        operands = [sent_of.get(v, ()) if isinstance(v, Var) else () for v in values]
        results = [_union(operands)] * len(eqn.outvars)
        if eqn.primitive is federated_map_p:
            marks = _marks(eqn.params["jaxpr"].jaxpr, id(eqn))
            results = [mark or before for mark, before in zip(marks, results, strict=True)]
        elif eqn.primitive.name == "optimization_barrier":
            results = operands
        sent_of |= {v: mark for v, mark in zip(eqn.outvars, results, strict=True) if mark}
    return sent_of


def kept_values(plan: StreamingPlan) -> tuple[set[int], set[Var]]:
    """Find the participants' own states: equations that read them, values that are written back."""
    # Participants neither receive nor send them. Equations are given by their identities.
    by_result = {v: eqn for eqn in plan.jaxpr.eqns for v in eqn.outvars}
    reads: set[int] = set()
    written: set[Var] = set()
    for eqn in plan.jaxpr.eqns:
        if is_mark(eqn, KEPT):
            written.update(eqn.outvars)
            waiting = [eqn]
            while waiting:
                needed = waiting.pop()
                if id(needed) in reads or needed.primitive is federated_map_p:
                    continue
                reads.add(id(needed))
                waiting += [by_result[v] for v in _variables(needed) if v in by_result]
        elif eqn.primitive.name in SHAPE_PRIMITIVES and written.intersection(_variables(eqn)):
            written.update(eqn.outvars)
    return reads, written


def server_work(plan: StreamingPlan) -> tuple[set[int], set[Var]]:
    """Find the work of the server that runs on the participants' devices."""
    # Identities of maps whose functions mark a value as the server's, and of equations that only
    # compute their arguments or read their results; and the values from such maps alone.
    equations: set[int] = set()
    values: set[Var] = set()
    for eqn in plan.jaxpr.eqns:
        if eqn.primitive is federated_map_p:
            if not has_mark(eqn.params["jaxpr"].jaxpr, SERVER):
                continue
        elif not any(v in plan.producer for v in eqn.outvars):
            continue
        else:
            placed = [v for v in _variables(eqn) if v in plan.producer]
            if not placed or not values.issuperset(placed):
                continue
        equations.add(id(eqn))
        values.update(eqn.outvars)
    if not equations:
        return equations, values
    others = {v for v in plan.jaxpr.outvars if isinstance(v, Var)}
    for eqn in reversed(plan.jaxpr.eqns):  # what only the server's maps read is the server's too
        if id(eqn) in equations:
            continue
        if any(v in plan.producer for v in eqn.outvars) and others.isdisjoint(eqn.outvars):
            equations.add(id(eqn))
        else:
            others.update(_variables(eqn))
    return equations, values


def _marks(jaxpr: Jaxpr, map_id: int) -> list[tuple[Sent, ...]]:
    """Return the marked values that each result of a mapped function is computed from."""
    count = 0

    def visit(jaxpr: Jaxpr, executions: int) -> dict[Var, tuple[Sent, ...]]:
        nonlocal count
        sent_of: dict[Var, tuple[Sent, ...]] = {}
        for eqn in jaxpr.eqns:
            marks = _union(sent_of.get(v, ()) for v in eqn.invars if isinstance(v, Var))
            for inner in inner_jaxprs(eqn):
                times = executions * eqn.params.get("length", 1)
                marks = _union([marks, *visit(inner, times).values()])
            name = eqn.params.get("name") if eqn.primitive.name == "name" else None
            if name is not None and name.startswith(SENT):
                aval, size = aval_of(eqn.outvars[0]), num_bytes(eqn.outvars[0])
                described = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
                replaced = int(name.removeprefix(SENT))
                marks = (Sent(map_id, count, described, size, replaced, executions),)
                count += 1
            if marks:
                sent_of |= dict.fromkeys(eqn.outvars, marks)
        return sent_of

    sent_of = visit(jaxpr, 1)
    return [sent_of.get(v, ()) if isinstance(v, Var) else () for v in jaxpr.outvars]


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if isinstance(v, Var)]


def _union(groups: Iterable[tuple[Sent, ...]]) -> tuple[Sent, ...]:
    return tuple(dict.fromkeys(sent for group in groups for sent in group))
