"""The streaming pass: participants are reduced as they come, and never all held at once.

`mean(map(f, broadcast(p), data))`, run as it is written, holds what all participants return, and
a copy of p for each of them. This pass finds, in the jaxpr of a program, the maps, the elementwise
work behind them and the reductions that it feeds, and runs them as one loop over the participants
that adds up as it goes, with one all-reduce behind it. Broadcasts enter the loop as they are, and
only what is wanted of each participant is stored.

A program's equations fall into *phases*. What needs the result of a reduction belongs to a later
phase than what was reduced, so a phase is some work of the server, then one loop. A derivative is
nothing special: the map and its transpose share a loop where no reduction stands between them, and
then the residuals that lie between are not stored either.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import (
    CHECKPOINT_PRIMITIVES,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    eliminate_dead_code,
    evaluate,
    inner_jaxprs,
    rebind,
    set_implementation,
)
from fedpax.primitives.broadcast import federated_broadcast_p, federated_index_p
from fedpax.primitives.extremum import (
    apply_mask,
    federated_mask_p,
    federated_max_p,
    federated_min_p,
)
from fedpax.primitives.layout import explicit_axis, replicate_over_placement
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.monoids import Monoid, apply_by_monoid
from fedpax.primitives.participant_loop import LazySlice, materialize, run_participants
from fedpax.primitives.placement import Placement
from fedpax.primitives.program import federated_program_p
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.primitives.sum import federated_sum_p
from fedpax.transforms.phases import Atom, StreamingPlan, plan_phases
from fedpax.transforms.unstack_rules import adds_participant_axis

# Calls that can be written out where they stand once all differentiation is done.
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

NUMPY_REDUCTIONS = {
    "reduce_sum": federated_sum_p,
    "reduce_max": federated_max_p,
    "reduce_min": federated_min_p,
}


def stream(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites a jaxpr so that each placement's participants are reduced as they come.

    Args:
        closed: the jaxpr of a program, or of what a participant runs.

    Returns:
        A jaxpr of the same function. Without federated equations it is the same jaxpr.
    """
    if not is_federated(closed.jaxpr):
        return closed
    return jax.make_jaxpr(functools.partial(run_streamed, closed))(*closed.in_avals)


def run_streamed(closed: ClosedJaxpr, *args: Any) -> list:
    """Runs a jaxpr with each placement's participants reduced as they come.

    Args:
        closed: the jaxpr of a program, or of what a participant runs.
        *args: its flat arguments, arrays or `LazySlice`s.

    Returns:
        Its flat outputs.
    """
    if is_federated(closed.jaxpr):
        closed = eliminate_dead_code(inline(closed))
    placements = placements_of(closed.jaxpr)
    for placement in placements[:-1]:
        rewritten = functools.partial(_execute, plan_phases(closed.jaxpr, placement), closed)
        closed = jax.make_jaxpr(rewritten)(*closed.in_avals)
    if not placements:
        return evaluate(closed, *map(materialize, args))
    return _execute(plan_phases(closed.jaxpr, placements[-1]), closed, *args)


def _implementation(
    *args: Any, jaxpr: ClosedJaxpr, placements: tuple[Placement, ...], name: str
) -> list:
    with jax.named_scope(name):
        return run_streamed(jaxpr, *args)


set_implementation(federated_program_p, _implementation)


# ---- reading a jaxpr


def is_federated(jaxpr: Jaxpr) -> bool:
    """Whether an equation at any depth runs participants."""
    return any(
        eqn.primitive is federated_map_p or any(map(is_federated, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def placements_of(jaxpr: Jaxpr) -> list[Placement]:
    """The placements whose maps run at the top level of a jaxpr."""
    maps = (eqn for eqn in jaxpr.eqns if eqn.primitive is federated_map_p)
    return list(dict.fromkeys(eqn.params["placement"] for eqn in maps))


def inline(
    closed: ClosedJaxpr, inside: Callable[[ClosedJaxpr], ClosedJaxpr] = stream
) -> ClosedJaxpr:
    """Writes out calls, and programs, that run participants or touch what they may; streams loops.

    Args:
        closed: the jaxpr of a program, or of what a participant runs.
        inside: what becomes of the jaxprs of loops and conditionals that run participants.

    Returns:
        A jaxpr of the same function.
    """
    return jax.make_jaxpr(functools.partial(_run_inlined, closed, inside))(*closed.in_avals)


def _run_inlined(
    closed: ClosedJaxpr, inside: Callable[[ClosedJaxpr], ClosedJaxpr], *args: Any
) -> list:
    # By identity, with whose they are; the values are held, so that no identity is given again.
    placed: dict[int, tuple[Any, Placement]] = {}
    sizes = set(_sizes(closed.jaxpr))

    def run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(v: Atom) -> Any:
            return v.val if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            owners = [placed[id(x)][1] for x in inputs if id(x) in placed]
            runs = any(map(is_federated, inner_jaxprs(eqn)))
            spread = any(aval_of(v).shape[:1] in sizes for v in eqn.outvars)
            body = _body(eqn)
            if body is not None and (runs or owners or spread):
                outputs = run(body.jaxpr, body.consts, inputs)
            elif runs and eqn.primitive is not federated_map_p:
                outputs = rebind(
                    eqn, inputs, {k: _changed(inside, v) for k, v in eqn.params.items()}
                )
            elif owners and (reduced := _reduced(eqn, inputs[0], owners[0])) is not None:
                outputs = [reduced]
            else:
                outputs = rebind(eqn, inputs)
                if eqn.primitive in (federated_map_p, federated_broadcast_p, federated_index_p):
                    owners = [eqn.params["placement"]]
                if owners and eqn.primitive not in REDUCTIONS:
                    placed.update((id(x), (x, owners[0])) for x in outputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run(closed.jaxpr, closed.consts, args)


def _sizes(jaxpr: Jaxpr) -> Iterator[tuple[int]]:
    """The first axis of what the participants of any placement hold."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is federated_map_p:
            yield (eqn.params["placement"].size,)
        for inner in inner_jaxprs(eqn):
            yield from _sizes(inner)


def _reduced(eqn: JaxprEqn, x: jax.Array, placement: Placement) -> jax.Array | None:
    """What NumPy's reduction over the participants' axis gives, by the reduction for participants.

    Derivatives hold such sums too, where NumPy's rules spread a server's array over participants.
    """
    primitive, axes = NUMPY_REDUCTIONS.get(eqn.primitive.name), eqn.params.get("axes", ())
    spec = jax.typeof(x).sharding.spec
    if primitive is None or 0 not in axes or eqn.params.get("out_sharding") is not None:
        return None
    if x.shape[0] != placement.size or spec[0] != explicit_axis(placement):
        return None
    (own,) = rebind(eqn, [x], eqn.params | {"axes": tuple(a for a in axes if a)})
    reduced = primitive.bind(own, placement=placement)
    return reduced if reduced.dtype == aval_of(eqn.outvars[0]).dtype else None


def _body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function of an equation that is a plain call."""
    if eqn.primitive.name not in CALLS:
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return None
    body = eqn.params[CALLS[eqn.primitive.name]]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def _changed(change: Callable[[ClosedJaxpr], ClosedJaxpr], param: Any) -> Any:
    """A parameter of a loop or a conditional, with the jaxprs in it changed."""
    if isinstance(param, ClosedJaxpr):
        return change(param)
    if isinstance(param, Jaxpr):
        return change(ClosedJaxpr(param, ())).jaxpr
    if type(param) in (tuple, list):
        return type(param)(_changed(change, p) for p in param)
    return param


# ---- running it


def _execute(plan: StreamingPlan, closed: ClosedJaxpr, *args: Any) -> list:
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True)
    )
    for phase in range(plan.last + 1):
        run_server(plan, phase, values)
        if phase in plan.loops:
            read = functools.partial(whole_value, plan, values)
            lie = functools.partial(_lazy_value, plan, values)
            stored, totals = run_loop(plan, phase, read, lie, plan.placement)
            values.update(stored)
            values.update(finish_reductions(plan, phase, totals))
    return [whole_value(plan, values, plan.resolve(v)) for v in jaxpr.outvars]


def whole_value(plan: StreamingPlan, values: dict[Var, Any], v: Atom) -> Any:
    """The value of a server's or of all participants together.

    Args:
        plan: the phases of the program.
        values: what has been computed; what it takes to compute `v` is added.
        v: what to look up.

    Returns:
        An array.
    """
    if isinstance(v, Literal):
        return v.val
    if v not in values:  # of the participants, but no loop stored it: it needs none
        eqn, _ = plan.producer[v]
        outputs = rebind(eqn, [whole_value(plan, values, o) for o in plan.operands(eqn)])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return materialize(values[v])


def _lazy_value(plan: StreamingPlan, values: dict[Var, Any], v: Var) -> Any:
    return values[v] if isinstance(values.get(v), LazySlice) else whole_value(plan, values, v)


def run_server(plan: StreamingPlan, phase: int, values: dict[Var, Any]) -> None:
    """Runs the server's part of a phase, and adds what it computes to the values."""
    for eqn in plan.server.get(phase, ()):
        outputs = rebind(eqn, [whole_value(plan, values, v) for v in plan.operands(eqn)])
        values.update(zip(eqn.outvars, outputs, strict=True))


def run_loop(
    plan: StreamingPlan,
    phase: int,
    read_server: Callable[[Var], Any],
    read_placed: Callable[[Var], Any],
    placement: Placement,
    first: Any = 0,
) -> tuple[dict[Var, Any], list]:
    """Runs the loop of a phase over its participants, or over some of them.

    Args:
        plan: the phases of the program.
        phase: one that has a loop.
        read_server: looks up a server value that the loop reads.
        read_placed: looks up a placed value, of those participants that are to run; an array, or
            a `LazySlice`.
        placement: as the program's, but of as many participants as are to run.
        first: the number of the first of these.

    Returns:
        What is stored of each participant, by value, and the totals of all reductions, before
        `finish`.
    """
    shared, placed = plan.reads(phase)
    stored = list(plan.stored[phase])
    computed = plan.computed(phase)
    reductions = plan.reductions.get(phase, ())

    def one(number: jax.Array, arguments: list, slices: list) -> list:
        servers = dict(zip(shared, arguments, strict=True))
        own = dict(zip(placed, slices, strict=True))

        def mine(v: Atom) -> Any:
            if isinstance(v, Literal):
                return v.val
            if v in own:
                return own[v]
            return jax.lax.squeeze(servers[v], [0]) if aval_of(v).ndim else servers[v]

        for eqn in computed:
            _, params = plan.producer[eqn.outvars[0]]
            operands = plan.operands(eqn)
            if adds_participant_axis(eqn):
                inputs = [v.val if isinstance(v, Literal) else servers[v] for v in operands]
            else:
                inputs = list(map(mine, operands))
            if eqn.primitive is federated_map_p:
                outputs = run_streamed(params["jaxpr"], *inputs)
            elif eqn.primitive is federated_index_p:
                outputs = [number]
            elif eqn.primitive is federated_broadcast_p:
                outputs = inputs
            elif eqn.primitive is federated_mask_p:
                outputs = [apply_mask(*map(materialize, inputs))]
            else:
                outputs = rebind(eqn, list(map(materialize, inputs)), params)
            for v, output in zip(eqn.outvars, outputs, strict=True):
                own.setdefault(v, output)  # one that is read counts, not its repetition
        outputs = [materialize(mine(v)) for v in stored]
        for eqn in reductions:
            values = [jnp.asarray(materialize(mine(v))) for v in plan.operands(eqn)]
            outputs += REDUCTIONS[eqn.primitive].terms(*values)
        return outputs

    arguments = [replicate_over_placement(read_server(v), placement) for v in shared]
    slices = [read_placed(v) for v in placed]
    # Loops inside of a participant read its arguments where they lie.
    read_inside = {
        v
        for eqn in computed
        if eqn.primitive is federated_map_p and is_federated(eqn.params["jaxpr"].jaxpr)
        for v in plan.operands(eqn)
        if isinstance(v, Var)
    }
    lent = [v in read_inside for v in placed]
    results = run_participants(
        one,
        arguments,
        slices,
        _monoids(plan, phase),
        placement,
        plan.chunk_size(phase),
        lent,
        first,
    )
    return dict(zip(stored, results, strict=False)), results[len(stored) :]


def _monoids(plan: StreamingPlan, phase: int) -> list[Monoid]:
    """What each total of a phase's reductions is combined by: they have one for each operand."""
    reductions = plan.reductions.get(phase, ())
    return [REDUCTIONS[eqn.primitive].monoid for eqn in reductions for _ in eqn.invars]


def merge_totals(plan: StreamingPlan, phase: int, some: Sequence[Any], others: Sequence[Any]) -> list:
    """Combines the totals that `run_loop` gives over some participants and over others."""
    return apply_by_monoid(_monoids(plan, phase), lambda m, a, b: m.merge(a, b), some, others)


def finish_reductions(plan: StreamingPlan, phase: int, totals: Sequence[Any]) -> dict[Var, Any]:
    """The results of a phase's reductions, from the totals over all participants."""
    found: dict[Var, Any] = {}
    rest = iter(totals)
    for eqn in plan.reductions.get(phase, ()):
        own = [next(rest) for _ in eqn.invars]
        dtype = aval_of(plan.operands(eqn)[0]).dtype
        results = REDUCTIONS[eqn.primitive].finish(own, plan.placement.size, dtype)
        found.update(zip(eqn.outvars, results, strict=True))
    return found
