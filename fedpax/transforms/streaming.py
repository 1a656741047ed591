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
from fedpax.primitives.broadcast import federated_broadcast_p
from fedpax.primitives.layout import explicit_axis, lay_out_shared, unplaced_aval
from fedpax.primitives.map import federated_map_p, run_participants
from fedpax.primitives.placement import ClientsPerStep, Placement
from fedpax.primitives.program import federated_program_p
from fedpax.primitives.reduce import REDUCTIONS, Monoid
from fedpax.transforms.participantwise import Params, on_one_participant

Atom = Var | Literal

# Calls that can be written out where they stand once all differentiation is done.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def stream(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites a jaxpr so that each placement's participants are reduced as they come.

    Args:
        closed: the jaxpr of a program, or of what a participant runs.

    Returns:
        A jaxpr of the same function. Without federated equations it is the same jaxpr.
    """
    if not _is_federated(closed.jaxpr):
        return closed
    closed = live(_inline(closed))
    for placement in _placements(closed.jaxpr):
        plan = _plan(closed.jaxpr, placement)
        if plan.loops:
            run = functools.partial(_execute, plan, closed)
            closed = jax.make_jaxpr(run)(*closed.in_avals)
    return closed


def _implementation(
    *args: Any, jaxpr: ClosedJaxpr, placements: tuple[Placement, ...], name: str
) -> list:
    with jax.named_scope(name):
        return evaluate(stream(jaxpr), *args)


set_implementation(federated_program_p, _implementation)


# ---- reading a jaxpr


def _of(eqn: JaxprEqn, placement: Placement) -> bool:
    return eqn.params.get("placement") == placement


def _is_federated(jaxpr: Jaxpr) -> bool:
    """Whether an equation at any depth runs participants; a nested program sees to its own."""
    return any(
        eqn.primitive is federated_map_p
        or (eqn.primitive is not federated_program_p and any(map(_is_federated, inner_jaxprs(eqn))))
        for eqn in jaxpr.eqns
    )


def _placements(jaxpr: Jaxpr) -> list[Placement]:
    maps = (eqn for eqn in jaxpr.eqns if eqn.primitive is federated_map_p)
    return list(dict.fromkeys(eqn.params["placement"] for eqn in maps))


def _inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Writes out the calls that run participants or touch placed values; streams inside loops."""
    return jax.make_jaxpr(functools.partial(_run_inlined, closed))(*closed.in_avals)


def _run_inlined(closed: ClosedJaxpr, *args: Any) -> list:
    placed: dict[int, Any] = {}  # by identity; the values are held, so that none is given again

    def run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(v: Atom) -> Any:
            return v.val if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            touched = any(id(x) in placed for x in inputs)
            inside = [j for j in inner_jaxprs(eqn) if _is_federated(j)]
            body = _body(eqn)
            if body is not None and (inside or touched):
                outputs = run(body.jaxpr, body.consts, inputs)
            elif inside and eqn.primitive not in (federated_map_p, federated_program_p):
                outputs = rebind(eqn, inputs, {k: _streamed(v) for k, v in eqn.params.items()})
            else:
                outputs = rebind(eqn, inputs)
                starts = eqn.primitive in (federated_map_p, federated_broadcast_p)
                if starts or (touched and eqn.primitive not in REDUCTIONS):
                    placed.update((id(x), x) for x in outputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run(closed.jaxpr, closed.consts, args)


def _body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function of an equation that is a plain call."""
    if eqn.primitive.name not in CALLS:
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return None
    body = eqn.params[CALLS[eqn.primitive.name]]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def _streamed(param: Any) -> Any:
    """A parameter of a loop or a conditional, with the jaxprs in it streamed."""
    if isinstance(param, ClosedJaxpr):
        return stream(param)
    if isinstance(param, Jaxpr):
        return stream(ClosedJaxpr(param, ())).jaxpr
    if type(param) in (tuple, list):
        return type(param)(map(_streamed, param))
    return param


# ---- the plan


class _Plan:
    """Which equations of a jaxpr run in which stage's loop, for one placement.

    Attributes:
        placement: whose participants.
        aliases: results of maps that are arguments of them.
        producer: for each value that a participant can compute of its own, the equation, and the
            parameters of the same equation on slices.
        mapped: those among these values that need a map.
        stage: the stage of each value that is not of stage 0.
        loops: the stages that have a loop.
        reductions: by stage, the reductions that its loop feeds.
        stored: by stage, what its loop stores of each participant, and for whom.
        server: by stage, the equations of the server.
    """

    def __init__(self, jaxpr: Jaxpr, placement: Placement):
        self.jaxpr = jaxpr
        self.placement = placement
        self.aliases: dict[Var, Atom] = {}
        self.producer: dict[Var, tuple[JaxprEqn, Params]] = {}
        self.mapped: set[Var] = set()
        self.stage: dict[Var, int] = {}
        self.loops: dict[int, list[JaxprEqn]] = {}
        self.reductions: dict[int, list[JaxprEqn]] = {}
        self.stored: dict[int, dict[Var, str]] = {}
        self.server: dict[int, list[JaxprEqn]] = {}

    def resolve(self, v: Atom) -> Atom:
        while isinstance(v, Var) and v in self.aliases:
            v = self.aliases[v]
        return v

    def operands(self, eqn: JaxprEqn) -> list[Atom]:
        return [self.resolve(v) for v in eqn.invars]

    def stage_of(self, v: Atom) -> int:
        return 0 if isinstance(v, Literal) else self.stage.get(v, 0)

    def is_mapped(self, v: Atom) -> bool:
        return isinstance(v, Var) and v in self.mapped

    def after(self, operands: Sequence[Atom]) -> int:
        """The first stage whose server has all of these: behind the loops that make them."""
        return max((self.stage_of(v) + self.is_mapped(v) for v in operands), default=0)

    def earlier(self, v: Atom, stage: int) -> bool:
        """Whether the loop of a stage reads a participant's value that another loop stored."""
        return self.is_mapped(v) and self.stage_of(v) < stage

    def store(self, v: Atom, why: str) -> None:
        """Notes that a value is needed as a whole."""
        if isinstance(v, Literal) or v not in self.mapped:
            return
        stage = self.stage_of(v)
        if stage in self.loops:
            self.stored[stage].setdefault(v, why)
            return
        for operand in self.operands(self.producer[v][0]):  # computed outside of any loop
            self.store(operand, why)

    def inputs(self, v: Atom, stage: int) -> Iterator[tuple[Var, bool]]:
        """What the loop of a stage reads for a participant's value: (value, whether placed)."""
        if isinstance(v, Literal):
            return
        if v not in self.producer or self.earlier(v, stage):
            yield v, aval_of(v).ndim > 0
            return
        eqn, _ = self.producer[v]
        for operand in self.operands(eqn):
            if eqn.primitive is federated_broadcast_p:
                if not isinstance(operand, Literal):
                    yield operand, False
            else:
                yield from self.inputs(operand, stage)

    def roots(self, stage: int) -> Iterator[Atom]:
        """The values that the loop of a stage is there to compute."""
        for eqn in self.reductions.get(stage, ()):
            yield from self.operands(eqn)
        yield from self.stored[stage]


def _plan(jaxpr: Jaxpr, placement: Placement) -> _Plan:
    plan = _Plan(jaxpr, placement)
    size, axis = placement.size, explicit_axis(placement)
    others: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        operands = plan.operands(eqn)
        stage = max(map(plan.stage_of, operands), default=0)
        own = [isinstance(v, Var) and v in plan.producer for v in operands]
        # A map without results runs for its effects, and belongs to no reduction.
        if eqn.primitive is federated_map_p and _of(eqn, placement) and eqn.outvars:
            _alias_forwarded(plan, eqn, operands)
            plan.loops.setdefault(stage, []).append(eqn)
            plan.stored.setdefault(stage, {})
            params: Params | None = eqn.params
        elif eqn.primitive is federated_broadcast_p and _of(eqn, placement):
            params = eqn.params
        elif any(own):
            placed = [
                mine or (isinstance(v, Var) and aval_of(v).shape[:1] == (size,))
                for mine, v in zip(own, operands, strict=True)
            ]
            params = on_one_participant(eqn, size, axis, placed)
        else:
            params = None
        if params is not None:
            for v in eqn.outvars:
                plan.producer[v] = eqn, params
                plan.stage[v] = stage
            if eqn.primitive is federated_map_p or any(map(plan.is_mapped, operands)):
                plan.mapped.update(eqn.outvars)
            continue
        plan.stage.update(dict.fromkeys(eqn.outvars, plan.after(operands)))
        others.append(eqn)
    _pull_in(plan, others, axis)
    for eqn in others:
        operands = plan.operands(eqn)
        stage = plan.after(operands)
        # Fused where its loop can read all operands: weights may come from a later stage.
        fits = stage - 1 in plan.loops and stage - 1 == max(map(plan.stage_of, operands))
        if eqn.primitive in REDUCTIONS and _of(eqn, placement) and fits:
            plan.reductions.setdefault(stage - 1, []).append(eqn)
            continue
        plan.server.setdefault(stage, []).append(eqn)
        for operand in operands:
            plan.store(operand, f"the server reads it in {eqn.primitive.name!r}")
    for out in jaxpr.outvars:
        plan.store(plan.resolve(out), "the program returns it")
    for stage in sorted(plan.loops, reverse=True):
        for root in list(plan.roots(stage)):
            for v, _ in list(plan.inputs(root, stage)):
                if plan.earlier(v, stage):
                    plan.store(v, "a later stage reads it, which needs a reduction first")
    return plan


def _pull_in(plan: _Plan, others: list[JaxprEqn], axis: str | None) -> None:
    """Moves into the loops what is done to placed arguments before, where nobody else needs it."""
    users: dict[Var, list[JaxprEqn | None]] = {}
    for eqn in plan.jaxpr.eqns:
        for v in plan.operands(eqn):
            if isinstance(v, Var):
                users.setdefault(v, []).append(eqn)
    for v in map(plan.resolve, plan.jaxpr.outvars):
        if isinstance(v, Var):
            users.setdefault(v, []).append(None)
    size = plan.placement.size

    def in_loops(user: JaxprEqn | None) -> bool:
        if user is None or user.primitive is federated_broadcast_p:
            return False
        if user.primitive in REDUCTIONS:
            return _of(user, plan.placement) and any(v in plan.mapped for v in plan.operands(user))
        return bool(user.outvars) and user.outvars[0] in plan.producer

    for eqn in reversed(others):
        if not all(in_loops(user) for v in eqn.outvars for user in users.get(v, ())):
            continue
        operands = plan.operands(eqn)
        placed = [isinstance(v, Var) and aval_of(v).shape[:1] == (size,) for v in operands]
        if not any(placed):
            continue
        params = on_one_participant(eqn, size, axis, placed)
        if params is not None:
            others.remove(eqn)
            plan.producer.update((v, (eqn, params)) for v in eqn.outvars)


def _alias_forwarded(plan: _Plan, eqn: JaxprEqn, operands: Sequence[Atom]) -> None:
    """A map's result that is its argument needs no storing: residuals are often of this kind."""
    inner = eqn.params["jaxpr"].jaxpr
    position = {v: i for i, v in enumerate(inner.invars)}
    for outer, v in zip(eqn.outvars, inner.outvars, strict=True):
        if isinstance(v, Var) and v in position:
            plan.aliases[outer] = operands[position[v]]


# ---- running it


def _execute(plan: _Plan, closed: ClosedJaxpr, *args: Any) -> list:
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True)
    )

    def whole(v: Atom) -> Any:
        if isinstance(v, Literal):
            return v.val
        if v not in values:  # of the participants, but no loop stored it: it needs none
            eqn, _ = plan.producer[v]
            outputs = rebind(eqn, [whole(o) for o in plan.operands(eqn)])
            values.update(zip(eqn.outvars, outputs, strict=True))
        return values[v]

    last = max([0, *plan.server, *plan.loops])
    for stage in range(last + 1):
        for eqn in plan.server.get(stage, ()):
            outputs = rebind(eqn, [whole(v) for v in plan.operands(eqn)])
            values.update(zip(eqn.outvars, outputs, strict=True))
        if stage in plan.loops:
            values.update(_run_loop(plan, stage, whole))
    return [whole(plan.resolve(v)) for v in jaxpr.outvars]


def _run_loop(plan: _Plan, stage: int, whole: Callable[[Atom], Any]) -> dict[Var, Any]:
    placement = plan.placement
    reads = [pair for root in plan.roots(stage) for pair in plan.inputs(root, stage)]
    shared = list(dict.fromkeys(v for v, is_placed in reads if not is_placed))
    placed = list(dict.fromkeys(v for v, is_placed in reads if is_placed))
    reductions = plan.reductions.get(stage, [])
    stored = list(plan.stored[stage])
    kinds: list[list[Monoid | None]] = []

    def one(*flat: Any) -> list:
        servers = dict(zip(shared, flat, strict=False))
        slices = dict(zip(placed, flat[len(shared) :], strict=True))

        def server(v: Atom) -> Any:
            return v.val if isinstance(v, Literal) else servers[v]

        def mine(v: Atom) -> Any:
            if isinstance(v, Literal):
                return v.val
            if v in slices:
                return slices[v]
            if v not in plan.producer:
                return servers[v]
            eqn, params = plan.producer[v]
            operands = plan.operands(eqn)
            if eqn.primitive is federated_broadcast_p:
                slices[v] = server(operands[0])
                return slices[v]
            inputs = [mine(o) for o in operands]
            if eqn.primitive is federated_map_p:
                outputs = evaluate(stream(params["jaxpr"]), *inputs)
            else:
                outputs = rebind(eqn, inputs, params)
            slices.update(zip(eqn.outvars, outputs, strict=True))
            return slices[v]

        outputs = [mine(v) for v in stored]
        kinds.append([None] * len(stored))
        for eqn in reductions:
            reduction = REDUCTIONS[eqn.primitive]
            terms = reduction.terms(*[jnp.asarray(mine(v)) for v in plan.operands(eqn)])
            outputs += terms
            kinds[-1] += [reduction.monoid] * len(terms)
        return outputs

    arguments = [lay_out_shared(whole(v), placement) for v in shared]
    slices = [whole(v) for v in placed]
    jaxpr = live(
        jax.make_jaxpr(one)(
            *map(jax.typeof, arguments), *[unplaced_aval(jax.typeof(a)) for a in slices]
        )
    )
    results = iter(
        run_participants(
            jaxpr, arguments, slices, kinds[-1], placement, _at_once(plan.loops[stage])
        )
    )
    found = {v: next(results) for v in stored}
    for eqn in reductions:
        reduction = REDUCTIONS[eqn.primitive]
        x, *weights = plan.operands(eqn)
        totals = [next(results) for _ in range(1 + len(weights))]
        found[eqn.outvars[0]] = reduction.finish(totals, placement.size, aval_of(x).dtype)
    return found


def _at_once(maps: Sequence[JaxprEqn]) -> ClientsPerStep:
    """The setting of maps that share a loop: the one that needs least memory."""
    settings = [eqn.params["clients_per_step"] for eqn in maps]
    numbers = [s for s in settings if isinstance(s, int)]
    return min(numbers) if numbers else ("auto" if "auto" in settings else None)


# ---- in words


def explain(program: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Says how the streaming pass runs a program, and what it had to store of each participant.

    Args:
        program: a function decorated with `fedpax.program`, or one that calls such functions, for
            example its gradient.
        *args: what it is called with: arrays, or `jax.ShapeDtypeStruct`s.
        **kwargs: likewise.

    Returns:
        A few lines of text: for each program and stage, what one loop runs, reduces and stores,
        and for each stored value who needs it.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=4, clients_per_step=1)
        ... def mean_square(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: (w - x) ** 2, x))
        >>> print(fedpax.explain(mean_square, 1.0, jnp.zeros((4, 3))))
        program mean_square
          clients=4, stage 0: 1 map, 1 reduction, 1 at once on a device; nothing is stored.
    """
    closed = jax.make_jaxpr(program)(*args, **kwargs)
    lines = [line for eqn in _programs(closed.jaxpr) for line in _explain_program(eqn)]
    return "\n".join(lines) or "There is no fedpax program in this function."


def _programs(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is federated_program_p:
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _programs(inner)


def _explain_program(eqn: JaxprEqn) -> Iterator[str]:
    yield f"program {eqn.params['name']}"
    yield from (f"  {line}" for line in _explain_jaxpr(eqn.params["jaxpr"]))


def _explain_jaxpr(closed: ClosedJaxpr) -> Iterator[str]:
    closed = live(_inline(closed))
    placements = _placements(closed.jaxpr)
    if not placements:
        yield "No map runs at its top level: there is nothing to stream."
    for placement in placements:
        plan = _plan(closed.jaxpr, placement)
        for stage, maps in sorted(plan.loops.items()):
            at_once = _at_once(maps)
            stored = plan.stored[stage]
            yield (
                f"{placement}, stage {stage}: {_count(len(maps), 'map')}, "
                f"{_count(len(plan.reductions.get(stage, ())), 'reduction')}, "
                f"{'all' if at_once is None else at_once} at once on a device; "
                + ("stored of each participant:" if stored else "nothing is stored.")
            )
            yield from (f"  {aval_of(v).str_short()}: {why}" for v, why in stored.items())
            for eqn in maps:
                if _is_federated(eqn.params["jaxpr"].jaxpr):
                    yield f"  inside, on one of the {placement.name}:"
                    yield from (f"    {line}" for line in _explain_jaxpr(eqn.params["jaxpr"]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
