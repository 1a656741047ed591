"""Rows of participants that do not answer, in the server's part of a divided program.

The server has zeros in the row of an absent participant. Two rewrites let code on rows give
what it gives for the participants that answer:

- The participants send the terms of every federated reduction, and a reduction by `jax.numpy` of
  rows that the server has leaves out absent ones.
- Code such as `jnp.where(weight != 0, update, jnp.inf)` is work of the participants, who show its
  result. In the row of an absent participant the server has the result for zeros.
"""

import abc
from collections.abc import Iterator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Var,
    eliminate_dead_code,
    read_atom,
    rebind,
)
from fedpax.primitives.broadcast import broadcast
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.transforms.identity_map import identity_map
from fedpax.transforms.part_of_jaxpr import evaluate_from
from fedpax.transforms.planner import make_plan
from fedpax.transforms.streaming_plan import Atom, StreamingPlan


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
    """Fills in rows of absent participants.

    A reduction gets its identity. Other code gets the result of earlier code for zeros.
    """

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
