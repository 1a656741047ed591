"""Accesses to a store of clients that a loop over the cohort makes itself, row by row."""

from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Var, aval_of
from fedpax.primitives.client_rows import ClientRows, absent_beyond
from fedpax.primitives.jaxpr_analysis import all_eqns
from fedpax.transforms.marks import READ_CLIENTS, WRITE_CLIENTS
from fedpax.transforms.streaming_plan import Atom, StreamingPlan


class RowAccess(NamedTuple):
    """A read and a write of the same rows."""

    read: JaxprEqn
    write: JaxprEqn
    phase: int  # the phase whose loop reads and writes them
    # the loop's input, the new value that it stores, and the array after the write; for each array
    # of the store
    values: list[tuple[Var, Var, Var]]
    rows: list[Atom]
    client_ids: Atom
    num_clients: Atom

    def open(self, read: Any) -> dict[Var, ClientRows]:
        """Return the loop's inputs; `read` returns the value of an atom."""
        ids = absent_beyond(read(self.client_ids), read(self.num_clients))
        return {
            value: ClientRows(read(rows), ids)
            for (value, _, _), rows in zip(self.values, self.rows, strict=True)
        }


def is_store_access(eqn: JaxprEqn) -> bool:
    """Return whether an equation reads or writes the rows of a store."""
    return eqn.params.get("name") in (READ_CLIENTS, WRITE_CLIENTS)


def has_store_access(jaxpr: Jaxpr) -> bool:
    """Return whether an equation of a jaxpr reads or writes rows of a store, at any depth."""
    return any(map(is_store_access, all_eqns(jaxpr)))


def row_accesses(plan: StreamingPlan) -> list[RowAccess] | None:
    """Return the accesses that loops make themselves; None if they do not cover all accesses."""
    candidates = [eqn for eqn in plan.jaxpr.eqns if is_store_access(eqn)]
    reads = [eqn for eqn in candidates if eqn.params["name"] == READ_CLIENTS]
    writes = [eqn for eqn in candidates if eqn.params["name"] == WRITE_CLIENTS]
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    if is_explicit or len(reads) != len(writes):
        return None
    accesses = []
    for write in writes:
        count = len(write.outvars)
        location = plan.operands(write)[: count + 2]
        matching = [
            read
            for read in reads
            if len(read.outvars) == count and _same(plan.operands(read), location)
        ]
        access = _access(plan, matching[0], write) if len(matching) == 1 else None
        if access is None:
            return None
        accesses.append(access)
    return accesses


def _access(plan: StreamingPlan, read: JaxprEqn, write: JaxprEqn) -> RowAccess | None:
    """Return the access of a read and a write of the same rows; None if no loop can make it."""
    count = len(write.outvars)
    *rows, ids, num_clients = plan.operands(read)
    new = plan.operands(write)[count + 2 :]
    if len(new) != count or len(set(map(id, new))) != count:
        return None
    before, after = ([aval_of(v).shape for v in values] for values in (rows, write.outvars))
    if before != after or aval_of(ids).ndim != 1:  # vmap over states or ids
        return None
    phases = {plan.phase_of(v) for v in new}
    if len(phases) > 1 or not all(plan.is_stored(v) for v in new):
        return None
    (phase,) = phases
    shared = {p: set(plan.loop_inputs(p)[0]) for p in plan.loops}
    placed = {p: set(plan.loop_inputs(p)[1]) for p in plan.loops}
    server = [eqn for eqns in plan.server.values() for eqn in eqns if eqn is not write]
    read_by_server = [*plan.jaxpr.outvars, *(v for eqn in server for v in eqn.invars)]
    elsewhere = {v for v in map(plan.resolve, read_by_server) if isinstance(v, Var)}.union(
        *shared.values(), *(values for p, values in placed.items() if p != phase)
    )
    if elsewhere.intersection(read.outvars) or (elsewhere | placed[phase]).intersection(new):
        return None
    if not placed[phase].issuperset(read.outvars) or any(plan.axis[v] for v in new):  # type: ignore[index]
        return None
    values: Any = list(zip(read.outvars, new, write.outvars, strict=True))
    return RowAccess(read, write, phase, values, rows, ids, num_clients)


def _same(some: list[Atom], others: list[Atom]) -> bool:
    return len(some) == len(others) and all(
        a is b or (not isinstance(a, Var) and not isinstance(b, Var) and a.val == b.val)
        for a, b in zip(some, others, strict=True)
    )
