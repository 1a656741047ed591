"""Which values the participants of a divided program own, and checks that a plan can be divided."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives._jax import ClosedJaxpr, Literal, Var, aval_of, result_names
from fedpax.primitives.broadcast import federated_broadcast_p
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.primitives.source_lines import in_source
from fedpax.transforms.absent_rows import leave_out_absent
from fedpax.transforms.ownership import Division, Signature, divide
from fedpax.transforms.planner import make_plan
from fedpax.transforms.server_parts import ServerParts
from fedpax.transforms.streaming_plan import Atom, StreamingPlan
from fedpax.transforms.value_names import SAME, SAME_VALUE


def own_by_name(
    names: Sequence[str], own: Iterable[str], placed: set[int], placement: Placement
) -> set[int]:
    """Return the positions of the arguments that participants own, given by name."""
    owned = find_by_name(names, own, "own")
    for i in sorted(owned - placed):
        raise ArgumentError(
            f"stages(): own names {names[i]!r}, expected an argument with one row for each of "
            f"the {placement.size} {placement.name}. Pass own= without it."
        )
    return owned


def find_by_name(names: Sequence[str], prefixes: Iterable[str], argument: str) -> set[int]:
    """Return the positions of arguments, or of all leaves of pytrees, given by name."""
    if isinstance(prefixes, str):
        raise ArgumentTypeError(
            f"stages() got {argument}={prefixes!r}, expected a list of names. Pass "
            f"{argument}=[{prefixes!r}]."
        )
    positions: set[int] = set()
    for prefix in prefixes:
        matches = {
            i
            for i, name in enumerate(names)
            if name == prefix or name.startswith((f"{prefix}.", f"{prefix}["))
        }
        if not matches:
            close = difflib.get_close_matches(prefix, names, n=3, cutoff=0.0)
            raise ArgumentError(
                f"stages(): {argument} names {prefix!r}, which is not an argument. The nearest "
                f"names are {', '.join(map(repr, close))}."
            )
        positions |= matches
    return positions


def read_by_rows(closed: ClosedJaxpr, placement: Placement) -> set[int]:
    """Return the arguments of which participants read rows, or that a reduction reads.

    The others are the server's, also if their first axis has the number of participants by chance.
    """
    plan = make_plan(closed.jaxpr, placement)
    read: set[Var] = set()
    for phase in plan.loops:
        read.update(plan.loop_inputs(phase)[1])
    for eqn in reversed(closed.jaxpr.eqns):
        reduces = eqn.primitive in REDUCTIONS and eqn.params["placement"] == placement
        if eqn.primitive is federated_broadcast_p:
            continue  # every participant reads all rows
        if reduces or not read.isdisjoint(eqn.outvars):
            operands = (v for v in eqn.invars if isinstance(v, Var))
            read.update(v for v in operands if aval_of(v).shape[:1] == (placement.size,))
    return {i for i, v in enumerate(closed.jaxpr.invars) if v in read}


def read_by_server(plan: StreamingPlan, division: Division) -> dict[str, bool]:
    """Return the own values that the server reads, and whether participants read them too."""
    own = dict(zip(plan.jaxpr.invars[len(division.server_arguments) :], division.own, strict=True))
    copies = {  # results of the map that returns its argument
        v: own[operand]
        for v, unstacked in plan.producer.items()
        if unstacked.eqn.primitive is federated_map_p
        and result_names(unstacked.eqn.params["jaxpr"]) == (SAME,)
        and isinstance(operand := plan.operands(unstacked.eqn)[0], Var)
        and operand in own
    }
    server = ServerParts(plan)
    results = server.outputs[: len(division.server_results)]
    read = [v for inputs in server.inputs for v in inputs] + results
    by_clients: set[Var] = set()
    for phase in plan.loops:
        read += plan.loop_inputs(phase)[0]
        uses = [(unstacked.eqn, unstacked.axes.operands) for unstacked in plan.computed(phase)]
        uses += [(each.eqn, each.axes) for each in plan.reductions.get(phase, ())]
        for eqn, axes in uses:
            rows = zip(plan.operands(eqn), axes, strict=True)
            by_clients.update(v for v, a in rows if isinstance(v, Var) and a is not None)
    names = {**own, **copies}
    named = dict.fromkeys(v for v in read if isinstance(v, Var) and v in names)
    return {names[v]: v in copies and v in by_clients for v in named}


def divide_arguments(
    closed: ClosedJaxpr,
    placement: Placement,
    signature: Signature,
    owned: set[int],
    noise: Collection[str],
    *,
    is_given: bool,
) -> tuple[Division, StreamingPlan]:
    """Divide a program as `divide` does; return the plan too."""
    # `is_given`: the user named the own values. Otherwise those that only the server reads become
    # the server's.
    while True:
        division = divide(closed, placement, signature, owned, list(noise))
        plan = make_plan(division.core.jaxpr, placement)
        by_server = read_by_server(plan, division)
        for name, by_clients in by_server.items():
            if is_given or by_clients or name in noise:
                line = _first_read(division, name)
                raise ArgumentError(
                    f"stages(): the server reads {name}{line}, a value of the participants. To "
                    "send it, return it from a federated_map(). If the server has it, pass own= "
                    "without it."
                )
        if not by_server:
            core, plan = leave_out_absent(division.core, plan)
            return division._replace(core=core), plan
        positions = dict(zip(division.own, division.own_arguments, strict=False))
        owned = owned - {positions[name] for name in by_server}


def _first_read(division: Division, name: str) -> str:
    """Return the line of the first operation of the server on an own value, or ""."""
    jaxpr = division.core.jaxpr
    values = {jaxpr.invars[len(division.server_arguments) :][division.own.index(name)]}
    for eqn in jaxpr.eqns:
        if not any(isinstance(v, Var) and v in values for v in eqn.invars):
            continue
        if eqn.primitive is federated_map_p and result_names(eqn.params["jaxpr"]) == (SAME,):
            values.update(eqn.outvars)
        elif eqn.primitive is not federated_map_p and eqn.primitive not in REDUCTIONS:
            if line := in_source(eqn):
                return line
            values.update(eqn.outvars)  # such as a residual
    return ""


def check_means(plan: StreamingPlan) -> None:
    """Raise a ValueError if a sum over participants is divided by their number.

    That number is a constant in the program, so participants that do not answer would count.
    """
    size = plan.placement.size
    if size == 1:
        return
    sums: set[Var] = set()
    constants: dict[Var, float] = {}

    def constant(v: Atom) -> float | None:
        if isinstance(v, Literal):
            return float(np.asarray(v.val)) if np.size(v.val) == 1 else None
        return constants.get(v)

    def is_sum(v: Atom) -> bool:
        return isinstance(v, Var) and v in sums

    for eqn in plan.jaxpr.eqns:
        name, operands = eqn.primitive.name, plan.operands(eqn)
        if name == "reduce_sum" and id(eqn) in plan.candidates:
            sums.update(eqn.outvars)
        elif name in SAME_VALUE and operands:
            if is_sum(operands[0]):
                sums.update(eqn.outvars)
            if (value := constant(operands[0])) is not None:
                constants[eqn.outvars[0]] = value
        elif name == "div" and is_sum(operands[0]):
            divisor = constant(operands[1])
            if divisor is not None and divisor % size == 0:
                raise ArgumentError(
                    f"stages() found a sum over the {plan.placement.name} divided by "
                    f"{divisor:g}{in_source(eqn)}, a multiple of their number, as jnp.mean "
                    "computes it: participants that do not answer would count. Use "
                    "federated_mean(), or divide one federated_sum() by another."
                )
