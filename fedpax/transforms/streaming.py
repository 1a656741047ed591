"""The streaming pass: one loop per phase over chunks of participants accumulates the reductions."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    eliminate_dead_code,
    evaluate,
    rebind,
)
from fedpax.primitives.broadcast import federated_broadcast_p, federated_index_p
from fedpax.primitives.client_rows import ClientRows, LazySlice, materialize
from fedpax.primitives.layout import explicit_axis, replicate_over_placement
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.monoids import Monoid, apply_by_monoid
from fedpax.primitives.participant_loop import run_participants
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import apply_mask, federated_mask_p
from fedpax.transforms.inlining import inline, is_federated, placements_of
from fedpax.transforms.planner import make_plan
from fedpax.transforms.store_access import (
    RowAccess,
    has_store_access,
    is_store_access,
    row_accesses,
)
from fedpax.transforms.streaming_plan import Atom, StreamingPlan
from fedpax.transforms.unstack import Unstacked


def stream(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrite a jaxpr so that the participants of each placement run in loops."""
    if not is_federated(closed.jaxpr):
        return closed
    return jax.make_jaxpr(functools.partial(run_streamed, closed))(*closed.in_avals)


def run_streamed(closed: ClosedJaxpr, *args: jax.Array | LazySlice) -> list[jax.Array]:
    """Run a jaxpr with the participants of each placement in loops."""
    if is_federated(closed.jaxpr):
        if (planned := plan_row_accesses(closed, stream)) is not None:
            return _execute(*planned, *args)
        closed = eliminate_dead_code(inline(closed, stream))
    placements = placements_of(closed.jaxpr)
    for placement in placements[:-1]:
        rewritten = functools.partial(_execute, make_plan(closed.jaxpr, placement), closed, ())
        closed = jax.make_jaxpr(rewritten)(*closed.in_avals)
    if not placements:
        return evaluate(closed, *map(materialize, args))
    return _execute(make_plan(closed.jaxpr, placements[-1]), closed, (), *args)


def plan_row_accesses(
    closed: ClosedJaxpr, inside: Callable[[ClosedJaxpr], ClosedJaxpr]
) -> tuple[StreamingPlan, ClosedJaxpr, list[RowAccess]] | None:
    """Plan a jaxpr whose loops read and write the rows of stores; None if it has none."""
    if not has_store_access(closed.jaxpr):
        return None
    inlined = eliminate_dead_code(inline(closed, inside, is_store_access))
    placements = placements_of(inlined.jaxpr)
    if len(placements) != 1:
        return None
    plan = make_plan(inlined.jaxpr, placements[0])
    accesses = row_accesses(plan)
    return None if accesses is None else (plan, inlined, accesses)


def _execute(
    plan: StreamingPlan, closed: ClosedJaxpr, accesses: Sequence[RowAccess], *args: Any
) -> list[jax.Array]:
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True)
    )
    reads = {id(access.read): access for access in accesses}
    written = {id(access.write) for access in accesses}
    for phase in range(plan.last_phase + 1):
        run_server(plan, phase, values, reads, written)
        if phase in plan.loops:
            read_server = functools.partial(whole_value, plan, values)
            read_placed = functools.partial(_placed_value, plan, values)
            in_place = {
                new: old
                for access in accesses
                if access.phase == phase
                for old, new, _ in access.values
            }
            stored, totals = run_loop(
                plan, phase, read_server, read_placed, plan.placement, in_place=in_place
            )
            for access in accesses:
                if access.phase == phase:
                    values.update({after: stored.pop(new) for _, new, after in access.values})
            values.update(stored)
            values.update(finish_reductions(plan, phase, totals))
    return [whole_value(plan, values, plan.resolve(v)) for v in jaxpr.outvars]


def whole_value(plan: StreamingPlan, values: dict[Var, Any], v: Atom) -> Any:
    """Return a server value, or a placed value of all participants."""
    if isinstance(v, Literal):
        return v.val
    if v not in values:  # a value that needs no map, or that no loop stores
        eqn = plan.producer[v].eqn
        if (rows := _constant_rows(eqn)) is not None:
            return rows
        outputs = rebind(eqn, [whole_value(plan, values, o) for o in plan.operands(eqn)])
        values.update(zip(eqn.outvars, outputs, strict=True))
    value = materialize(values[v])
    return jnp.moveaxis(value, 0, plan.axis[v]) if plan.is_stored(v) else value


def _constant_rows(eqn: JaxprEqn) -> jax.Array | None:
    """Return a number that an equation broadcasts to participants, without a layout to gather."""
    if eqn.primitive is not federated_broadcast_p:
        return None
    (number,), (result,) = eqn.invars, eqn.outvars
    if not isinstance(number, Literal):
        return None
    if explicit_axis(eqn.params["placement"]):  # then the layout is part of the type
        return None
    return jnp.full(aval_of(result).shape, number.val, aval_of(result).dtype)


def _placed_value(plan: StreamingPlan, values: dict[Var, Any], v: Var) -> Any:
    """Return a placed value with the participants' axis first; arguments can be lazy."""
    as_it_is = plan.is_stored(v) or isinstance(values.get(v), (LazySlice, ClientRows))
    return values[v] if as_it_is else whole_value(plan, values, v)


def run_server(
    plan: StreamingPlan,
    phase: int,
    values: dict[Var, Any],
    reads: Mapping[int, RowAccess] = MappingProxyType({}),
    written: Collection[int] = (),
) -> None:
    """Run the server's equations of a phase, and add their results to `values`."""
    for eqn in plan.server.get(phase, ()):
        if id(eqn) in reads:
            values.update(reads[id(eqn)].open(functools.partial(whole_value, plan, values)))
            continue
        if id(eqn) in written:
            continue
        outputs = rebind(eqn, [whole_value(plan, values, v) for v in plan.operands(eqn)])
        values.update(zip(eqn.outvars, outputs, strict=True))


def loop_body(
    plan: StreamingPlan, phase: int
) -> Callable[[jax.Array, Sequence[Any], Sequence[Any]], list[Any]]:
    """Return the function of one participant in the loop of a phase."""
    # `(index, server values, slices) -> outputs`, of the inputs that `plan.loop_inputs` lists. The
    # outputs are the stored values, then the terms of all reductions.
    shared, placed = plan.loop_inputs(phase)
    stored = list(plan.stored[phase])
    computed = plan.computed(phase)

    def participant_fn(index: jax.Array, servers: Sequence[Any], slices: Sequence[Any]) -> list:
        values = _ParticipantValues(
            plan,
            index,
            dict(zip(shared, servers, strict=True)),
            dict(zip(placed, slices, strict=True)),
        )
        for unstacked in computed:
            values.run(unstacked)
        outputs = [materialize(values.slice_of(v)) for v in stored]
        for reduction in plan.reductions.get(phase, ()):
            operands = plan.operands(reduction.eqn)
            if reduction.takes_slices:
                outputs += reduction.terms(*map(values.array_of, operands))
            else:
                outputs += reduction.terms(*map(values.row_of, operands, reduction.axes))
        return outputs

    return participant_fn


def run_loop(
    plan: StreamingPlan,
    phase: int,
    read_server: Callable[[Var], Any],
    read_placed: Callable[[Var], Any],
    placement: Placement,
    first: int | jax.Array = 0,
    in_place: Mapping[Var, Var] = MappingProxyType({}),
) -> tuple[dict[Var, jax.Array], list[jax.Array]]:
    """Run the loop of a phase over all participants, or over some of them."""
    shared, placed = plan.loop_inputs(phase)
    stored = list(plan.stored[phase])
    server_values = [replicate_over_placement(read_server(v), placement) for v in shared]
    # Maps inside a mapped function index the arguments in place: no slice of them is copied.
    nested = [
        unstacked.eqn
        for unstacked in plan.computed(phase)
        if unstacked.eqn.primitive is federated_map_p
        and is_federated(unstacked.eqn.params["jaxpr"].jaxpr)
    ]
    read_by_nested = {v for eqn in nested for v in plan.operands(eqn) if isinstance(v, Var)}
    results = run_participants(
        loop_body(plan, phase),
        server_values,
        [read_placed(v) for v in placed],
        loop_monoids(plan, phase),
        placement,
        plan.chunk_size(phase),
        [v in read_by_nested for v in placed],
        first,
        {stored.index(new): placed.index(old) for new, old in in_place.items()},
    )
    return dict(zip(stored, results, strict=False)), results[len(stored) :]


class _ParticipantValues:
    """The values of one participant while a loop computes them.

    A *slice* is a value without the participants' axis, as a mapped function takes and returns.
    A *row* is a value with this axis, of size 1, as the equations between maps read and return.
    """

    def __init__(
        self, plan: StreamingPlan, index: jax.Array, servers: dict[Var, Any], slices: dict[Var, Any]
    ) -> None:
        self.plan = plan
        self.index = index
        self.servers = servers
        self.slices = slices
        self.rows: dict[Var, jax.Array] = {}

    def run(self, unstacked: Unstacked) -> None:
        """Run an equation on the values of the participant."""
        operands = self.plan.operands(unstacked.eqn)
        primitive = unstacked.eqn.primitive
        table = self.slices
        if primitive is federated_map_p:
            outputs = run_streamed(unstacked.params["jaxpr"], *map(self.slice_of, operands))
        elif primitive is federated_index_p:
            outputs = [self.index]
        elif primitive is federated_broadcast_p:
            outputs = [self.row_of(operands[0], None)]
        else:
            table = self.rows
            inputs = list(map(self.row_of, operands, unstacked.axes.operands))
            if primitive is federated_mask_p:
                outputs = [apply_mask(*inputs)]
            else:
                outputs = rebind(unstacked.eqn, inputs, unstacked.params)
        for v, output in zip(unstacked.eqn.outvars, outputs, strict=True):
            if v not in self.slices:  # not read from memory
                table[v] = output

    def slice_of(self, v: Atom) -> Any:
        """Return the slice of a value; an argument can be a `LazySlice`."""
        if isinstance(v, Literal):
            return v.val
        if v not in self.slices:
            self.slices[v] = jax.lax.squeeze(self.rows[v], [self.plan.axis[v]])
        return self.slices[v]

    def array_of(self, v: Atom) -> jax.Array:
        """Return the slice of a value as an array, also if a map returns a number."""
        value: Any = materialize(self.slice_of(v))
        return value if isinstance(value, jax.Array) else jnp.asarray(value, aval_of(v).dtype)

    def row_of(self, v: Atom, axis: int | None) -> Any:
        """Return the row of a value along an axis, or the whole value if `axis` is None."""
        if isinstance(v, Literal):
            return v.val
        if axis is None:
            return self.servers[v]
        if not self.plan.is_placed_input(v, axis):
            return jax.lax.dynamic_slice_in_dim(self.servers[v], self.index, 1, axis)
        if v not in self.rows:
            self.rows[v] = jax.lax.expand_dims(self.array_of(v), [axis])
        return self.rows[v]


def loop_monoids(plan: StreamingPlan, phase: int) -> list[Monoid]:
    """Return the monoid of each total of a loop."""
    return [m for reduction in plan.reductions.get(phase, ()) for m in reduction.monoids]


def merge_totals(
    plan: StreamingPlan, phase: int, some: Sequence[jax.Array], others: Sequence[jax.Array]
) -> list[jax.Array]:
    """Combine the totals of `run_loop` over some participants with those over others."""
    return apply_by_monoid(loop_monoids(plan, phase), lambda m, a, b: m.merge(a, b), some, others)


def finish_reductions(
    plan: StreamingPlan, phase: int, totals: Sequence[jax.Array]
) -> dict[Var, jax.Array]:
    """Return the results of the reductions of a phase, given the totals over all participants."""
    results: dict[Var, jax.Array] = {}
    rest = iter(totals)
    for reduction in plan.reductions.get(phase, ()):
        terms = [next(rest) for _ in reduction.monoids]
        results.update(zip(reduction.eqn.outvars, reduction.finish(terms), strict=True))
    return results
