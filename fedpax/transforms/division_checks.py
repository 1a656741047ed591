"""Which values the participants of a divided program own, and checks that a plan can be divided."""

from __future__ import annotations

import abc
import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    eliminate_dead_code,
    read_atom,
    rebind,
    result_names,
)
from fedpax.primitives.broadcast import broadcast, federated_broadcast_p
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.primitives.user_functions import in_source
from fedpax.transforms.marks import identity_map
from fedpax.transforms.ownership import Division, Signature, divide
from fedpax.transforms.part_of_jaxpr import evaluate_from
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
    """Return the arguments of which participants read rows, or that a reduction reads."""
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
    # Unless the user named the own values (`is_given`), those that only the server reads are its.
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
    """Raise a ValueError if a sum is divided by the number of participants, answered or not."""
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


# ---- rows of participants that do not answer, in the server's part of a divided program
#
# The server has zeros in the row of an absent participant. Two rewrites leave such rows out: the
# participants send the terms of every reduction; and code such as `jnp.where(weight != 0, update,
# jnp.inf)` is work of the participants, who show its result.


def leave_out_absent(closed: ClosedJaxpr, plan: StreamingPlan) -> tuple[ClosedJaxpr, StreamingPlan]:
    """Rewrite the server's part of a divided program for participants that do not answer."""
    for rewrite in (_Reductions, _ShownRows):
        if any(rewrite.changes(plan, eqn) for eqn in _server_eqns(plan)):
            closed = rewrite(closed, plan).rewrite()
            plan = make_plan(closed.jaxpr, plan.placement)
    return closed, plan


def _server_eqns(plan: StreamingPlan) -> Iterator[JaxprEqn]:
    for eqns in plan.server.values():
        yield from eqns
    for v in plan.on_server:
        yield plan.producer[v].eqn


class _Rewrite(abc.ABC):
    """Binds the equations of a program again, some of the server with other operands."""

    def __init__(self, closed: ClosedJaxpr, plan: StreamingPlan) -> None:
        self.closed, self.plan = closed, plan
        self.values: dict[Var, Any] = {}

    def rewrite(self) -> ClosedJaxpr:
        changed = {id(eqn) for eqn in _server_eqns(self.plan) if self.changes(self.plan, eqn)}

        def run(*arguments: jax.Array) -> list[Any]:
            jaxpr, values = self.closed.jaxpr, self.values
            values.update(zip(jaxpr.constvars, self.closed.consts, strict=True))
            values.update(zip(jaxpr.invars, arguments, strict=True))
            for eqn in jaxpr.eqns:
                operands = self.plan.operands(eqn)
                if id(eqn) in changed:
                    inputs = self.operands(eqn, operands)
                else:
                    inputs = [read_atom(v, values) for v in operands]
                values.update(zip(eqn.outvars, rebind(eqn, inputs), strict=True))
            return [read_atom(v, values) for v in jaxpr.outvars]

        return eliminate_dead_code(jax.make_jaxpr(run)(*self.closed.in_avals))

    @staticmethod
    @abc.abstractmethod
    def changes(plan: StreamingPlan, eqn: JaxprEqn) -> bool:
        """Return whether an equation of the server gets other operands."""

    @abc.abstractmethod
    def operands(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Any]:
        """Return the equation's operands."""


class _Reductions(_Rewrite):
    """Maps the operands of federated reductions, so that loops accumulate them."""

    @staticmethod
    def changes(plan: StreamingPlan, eqn: JaxprEqn) -> bool:
        return eqn.primitive in REDUCTIONS and _reduces_rows(plan, eqn)

    def operands(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Any]:
        axes = self.plan.candidates[id(eqn)].axes
        pairs = zip(operands, axes, strict=True)
        rows = (jnp.moveaxis(read_atom(v, self.values), axis, 0) for v, axis in pairs)
        mapped = [identity_map(x, self.plan.placement) for x in rows]
        return [jnp.moveaxis(x, 0, axis) for x, axis in zip(mapped, axes, strict=True)]


class _ShownRows(_Rewrite):
    """Fills in rows of absent participants: of a reduction its identity, else what zeros give."""

    def __init__(self, closed: ClosedJaxpr, plan: StreamingPlan) -> None:
        super().__init__(closed, plan)
        self.filled: dict[Var, jax.Array] = {}
        self.answered: jax.Array | None = None

    @staticmethod
    def changes(plan: StreamingPlan, eqn: JaxprEqn) -> bool:
        return _reduces_rows(plan, eqn) or any(_is_code(v, plan) for v in plan.operands(eqn))

    def operands(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Any]:
        if _reduces_rows(self.plan, eqn):
            reduction = self.plan.candidates[id(eqn)]
            rows = [read_atom(v, self.values) for v in operands]
            (identity,) = reduction.monoids[0].identity([rows[0].dtype])
            return [
                self._where_answered(x, axis, identity.astype(x.dtype))
                for x, axis in zip(rows, reduction.axes, strict=True)
            ]
        return [
            self._fill(v) if _is_code(v, self.plan) else read_atom(v, self.values) for v in operands
        ]

    def _fill(self, v: Var) -> jax.Array:
        if v not in self.filled:
            (absent,) = evaluate_from(self.closed, self._zeros(), [v])
            self.filled[v] = self._where_answered(self.values[v], self.plan.axis[v], absent)
        return self.filled[v]

    def _where_answered(self, x: jax.Array, axis: int, absent: jax.Array) -> jax.Array:
        """Replace the rows of participants that do not answer."""
        if self.answered is None:
            placement = self.plan.placement
            everyone = broadcast(jnp.bool_(True), placement)
            self.answered = _whole(identity_map(everyone, placement, "answered"))
        sizes = [size if a == axis else 1 for a, size in enumerate(x.shape)]
        return jnp.where(self.answered.reshape(sizes), _whole(x), absent)

    def _zeros(self) -> dict[Var, Any]:
        """Return the values that no loop computes, and zeros for the results of maps."""
        known: dict[Var, Any] = {}
        for v, x in self.values.items():
            if v not in self.plan.producer:
                known[v] = x
            elif self.plan.producer[v].eqn.primitive is federated_map_p:
                known[v] = jnp.zeros_like(x)
        return known


def _reduces_rows(plan: StreamingPlan, eqn: JaxprEqn) -> bool:
    """Return whether an equation reduces over rows that participants compute."""
    return id(eqn) in plan.candidates and any(map(plan.is_mapped, plan.operands(eqn)))


def _is_code(v: Atom, plan: StreamingPlan) -> TypeGuard[Var]:
    """Return whether participants show a value that array code computes from results of maps."""
    return (
        isinstance(v, Var)
        and plan.is_stored(v)
        and plan.producer[v].eqn.primitive is not federated_map_p
    )


def _whole(x: jax.Array) -> jax.Array:
    """Return a placed value as the server has it: no loop computes with a barrier."""
    return jax.lax.optimization_barrier(x)
