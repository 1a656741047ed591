"""The streaming pass: participants are reduced as they come, and never all held at once.

`mean(map(f, broadcast(p), data))`, run as it is written, holds what all participants return, and
a copy of p for each of them. This pass finds, in the jaxpr of a program, the maps, the elementwise
work behind them and the reductions that it feeds, and runs them as one loop over the participants
that adds up as it goes, with one all-reduce behind it. Broadcasts enter the loop as they are, and
only what is wanted of each participant is stored.

A program's equations fall into *stages*. What needs the result of a reduction belongs to a later
stage than what was reduced, so a stage is some work of the server, then one loop. A derivative is
nothing special: the map and its transpose share a loop where no reduction stands between them, and
then the residuals that lie between are not stored either.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import (
    CHECKPOINTS,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    evaluate,
    inner_jaxprs,
    live,
    rebind,
    set_implementation,
)
from fedpax.primitives.broadcast import federated_broadcast_p, federated_index_p
from fedpax.primitives.layout import explicit_axis, lay_out_shared
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.monoids import Monoid, combine
from fedpax.primitives.participant_loop import View, run_participants, taken
from fedpax.primitives.placement import Placement
from fedpax.primitives.program import federated_program_p
from fedpax.primitives.reduce import (
    REDUCTIONS,
    choose,
    federated_choice_p,
    federated_max_p,
    federated_min_p,
    federated_sum_p,
)
from fedpax.transforms.phases import Atom, Plan, plan_stages
from fedpax.transforms.unstack_rules import spreads

# Calls that can be written out where they stand once all differentiation is done.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "federated_program": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    **dict.fromkeys(CHECKPOINTS, "jaxpr"),
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
        *args: its flat arguments, arrays or `View`s.

    Returns:
        Its flat outputs.
    """
    if is_federated(closed.jaxpr):
        closed = live(inline(closed))
    placements = placements_of(closed.jaxpr)
    for placement in placements[:-1]:
        rewritten = functools.partial(_execute, plan_stages(closed.jaxpr, placement), closed)
        closed = jax.make_jaxpr(rewritten)(*closed.in_avals)
    if not placements:
        return evaluate(closed, *map(taken, args))
    return _execute(plan_stages(closed.jaxpr, placements[-1]), closed, *args)


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


def _execute(plan: Plan, closed: ClosedJaxpr, *args: Any) -> list:
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True)
    )
    for stage in range(plan.last + 1):
        run_server(plan, stage, values)
        if stage in plan.loops:
            read = functools.partial(whole, plan, values)
            lie = functools.partial(_where_it_lies, plan, values)
            stored, totals = run_loop(plan, stage, read, lie, plan.placement)
            values.update(stored)
            values.update(finish(plan, stage, totals))
    return [whole(plan, values, plan.resolve(v)) for v in jaxpr.outvars]


def whole(plan: Plan, values: dict[Var, Any], v: Atom) -> Any:
    """The value of a server's or of all participants together.

    Args:
        plan: the stages of the program.
        values: what has been computed; what it takes to compute `v` is added.
        v: what to look up.

    Returns:
        An array.
    """
    if isinstance(v, Literal):
        return v.val
    if v not in values:  # of the participants, but no loop stored it: it needs none
        eqn, _ = plan.producer[v]
        outputs = rebind(eqn, [whole(plan, values, o) for o in plan.operands(eqn)])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return taken(values[v])


def _where_it_lies(plan: Plan, values: dict[Var, Any], v: Var) -> Any:
    return values[v] if isinstance(values.get(v), View) else whole(plan, values, v)


def run_server(plan: Plan, stage: int, values: dict[Var, Any]) -> None:
    """Runs the server's part of a stage, and adds what it computes to the values."""
    for eqn in plan.server.get(stage, ()):
        outputs = rebind(eqn, [whole(plan, values, v) for v in plan.operands(eqn)])
        values.update(zip(eqn.outvars, outputs, strict=True))


def run_loop(
    plan: Plan,
    stage: int,
    read_server: Callable[[Var], Any],
    read_placed: Callable[[Var], Any],
    placement: Placement,
    first: Any = 0,
) -> tuple[dict[Var, Any], list]:
    """Runs the loop of a stage over its participants, or over some of them.

    Args:
        plan: the stages of the program.
        stage: one that has a loop.
        read_server: looks up a server value that the loop reads.
        read_placed: looks up a placed value, of those participants that are to run; an array, or
            a `View`.
        placement: as the program's, but of as many participants as are to run.
        first: the number of the first of these.

    Returns:
        What is stored of each participant, by value, and the totals of all reductions, before
        `finish`.
    """
    shared, placed = plan.reads(stage)
    stored = list(plan.stored[stage])
    computed = plan.computed(stage)
    reductions = plan.reductions.get(stage, ())

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
            if spreads(eqn):
                inputs = [v.val if isinstance(v, Literal) else servers[v] for v in operands]
            else:
                inputs = list(map(mine, operands))
            if eqn.primitive is federated_map_p:
                outputs = run_streamed(params["jaxpr"], *inputs)
            elif eqn.primitive is federated_index_p:
                outputs = [number]
            elif eqn.primitive is federated_broadcast_p:
                outputs = inputs
            elif eqn.primitive is federated_choice_p:
                outputs = [choose(*map(taken, inputs))]
            else:
                outputs = rebind(eqn, list(map(taken, inputs)), params)
            for v, output in zip(eqn.outvars, outputs, strict=True):
                own.setdefault(v, output)  # one that is read counts, not its repetition
        outputs = [taken(mine(v)) for v in stored]
        for eqn in reductions:
            values = [jnp.asarray(taken(mine(v))) for v in plan.operands(eqn)]
            outputs += REDUCTIONS[eqn.primitive].terms(*values)
        return outputs

    arguments = [lay_out_shared(read_server(v), placement) for v in shared]
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
        _monoids(plan, stage),
        placement,
        plan.at_once(stage),
        lent,
        first,
    )
    return dict(zip(stored, results, strict=False)), results[len(stored) :]


def _monoids(plan: Plan, stage: int) -> list[Monoid]:
    """What each total of a stage's reductions is combined by: they have one for each operand."""
    reductions = plan.reductions.get(stage, ())
    return [REDUCTIONS[eqn.primitive].monoid for eqn in reductions for _ in eqn.invars]


def merge(plan: Plan, stage: int, some: Sequence[Any], others: Sequence[Any]) -> list:
    """Combines the totals that `run_loop` gives over some participants and over others."""
    return combine(_monoids(plan, stage), lambda m, a, b: m.merge(a, b), some, others)


def finish(plan: Plan, stage: int, totals: Sequence[Any]) -> dict[Var, Any]:
    """The results of a stage's reductions, from the totals over all participants."""
    found: dict[Var, Any] = {}
    rest = iter(totals)
    for eqn in plan.reductions.get(stage, ()):
        own = [next(rest) for _ in eqn.invars]
        dtype = aval_of(plan.operands(eqn)[0]).dtype
        results = REDUCTIONS[eqn.primitive].finish(own, plan.placement.size, dtype)
        found.update(zip(eqn.outvars, results, strict=True))
    return found
