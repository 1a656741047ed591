"""The phases of a program: what a server does, then one loop over the participants, and so on.

What needs the result of a reduction belongs to a later phase than what was reduced. A plan says
for each equation of a program's jaxpr in which phase it runs, and whether the server runs it or
the loop over the participants, and for each phase what its loop reads, reduces and stores.
"""

from collections.abc import Iterator, Sequence

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Literal, Var, aval_of, is_rematerialized
from fedpax.primitives.broadcast import federated_broadcast_p, federated_index_p
from fedpax.primitives.extremum import federated_max_p, federated_min_p
from fedpax.primitives.layout import explicit_axis
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import ChunkSize, Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.transforms.unstack_rules import (
    Params,
    unstack,
    unstack_broadcast,
    adds_participant_axis,
)

Atom = Var | Literal

EXTREMA = (federated_max_p, federated_min_p)

# How many maps, each of another phase, a loop runs again one after another for a value.
MAX_REMAT_DEPTH = 2


class StreamingPlan:
    """Which equations of a jaxpr run in which phase's loop, for one placement.

    Attributes:
        placement: whose participants.
        aliases: results of maps that are arguments of them.
        producer: for each value that a participant can compute of its own, the equation, and the
            parameters of the same equation on slices.
        mapped: those among these values that need a map.
        repeats: for those among these that a later loop computes again instead of reading them,
            how many maps it runs for that, one after another and each of another phase.
        compared: what a maximum or minimum is taken of. Computed again, it may be rounded
            otherwise, and be equal to it no more: it is stored where a later phase reads it.
        phase: the phase of each value that is not of phase 0.
        loops: the phases that have a loop.
        reductions: by phase, the reductions that its loop feeds.
        stored: by phase, what its loop stores of each participant, and for whom.
        server: by phase, the equations of the server.
    """

    def __init__(self, jaxpr: Jaxpr, placement: Placement):
        self.jaxpr = jaxpr
        self.placement = placement
        self.aliases: dict[Var, Atom] = {}
        self.producer: dict[Var, tuple[JaxprEqn, Params]] = {}
        self.mapped: set[Var] = set()
        self.remat_depth: dict[Var, int] = {}
        for eqn in jaxpr.eqns:
            if _is_map(eqn, placement):
                _alias_forwarded(self, eqn)
        extrema = (eqn for eqn in jaxpr.eqns if eqn.primitive in EXTREMA)
        self.extremum_operands = {v for eqn in extrema for v in self.operands(eqn)}
        self.phase: dict[Var, int] = {}
        self.loops: dict[int, list[JaxprEqn]] = {}
        self.reductions: dict[int, list[JaxprEqn]] = {}
        self.stored: dict[int, dict[Var, str]] = {}
        self.server: dict[int, list[JaxprEqn]] = {}

    def resolve(self, v: Atom) -> Atom:
        """The value that this one is another name of."""
        while isinstance(v, Var) and v in self.aliases:
            v = self.aliases[v]
        return v

    def operands(self, eqn: JaxprEqn) -> list[Atom]:
        """What an equation reads."""
        return [self.resolve(v) for v in eqn.invars]

    def phase_of(self, v: Atom) -> int:
        """The phase in which a value is computed."""
        return 0 if isinstance(v, Literal) else self.phase.get(v, 0)

    def is_mapped(self, v: Atom) -> bool:
        """Whether a loop computes the value for each participant."""
        return isinstance(v, Var) and v in self.mapped

    def follows(self, eqn: JaxprEqn) -> int:
        """The phase of what the server computes: a loop that feeds a reduction runs before it."""
        operands = self.operands(eqn)
        if self.reduces(eqn) and any(map(self.is_rematerializable, operands)):
            return 1 + max(map(self.phase_of, operands))
        return max((self.phase_of(v) + self.is_mapped(v) for v in operands), default=0)

    def reduces(self, eqn: JaxprEqn) -> bool:
        """Whether an equation reduces over the placement's participants."""
        return eqn.primitive in REDUCTIONS and _of(eqn, self.placement)

    def is_rematerializable(self, v: Atom) -> bool:
        """Whether a later loop computes a participant's value again instead of reading it."""
        return isinstance(v, Var) and v in self.remat_depth

    def is_read(self, v: Atom, phase: int) -> bool:
        """Whether the loop of a phase reads a participant's value that another loop stored."""
        own = self.phase_of(v)
        if not self.is_mapped(v) or own >= phase or own not in self.loops:
            return False
        return not self.is_rematerializable(v) or v in self.stored[own]

    def store(self, v: Atom, why: str) -> None:
        """Notes that a value is needed as a whole."""
        if isinstance(v, Literal) or v not in self.mapped:
            return
        phase = self.phase_of(v)
        if phase in self.loops:
            self.stored[phase].setdefault(v, why)
            return
        for operand in self.operands(self.producer[v][0]):  # computed outside of any loop
            self.store(operand, why)

    def walk(self, phase: int) -> Iterator[tuple[Var, JaxprEqn | None]]:
        """What the loop of a phase computes, with its equations, and what it reads, without."""
        seen = set[Var]()
        waiting = list(self.roots(phase))
        while waiting:
            v = waiting.pop()
            if isinstance(v, Literal) or v in seen:
                continue
            seen.add(v)
            if v not in self.producer or self.is_read(v, phase):
                yield v, None
                continue
            eqn, _ = self.producer[v]
            yield v, eqn
            if not adds_participant_axis(eqn):
                waiting += self.operands(eqn)

    def computed(self, phase: int) -> list[JaxprEqn]:
        """The equations that the loop of a phase runs, in the order of the program."""
        found = {id(eqn) for _, eqn in self.walk(phase) if eqn is not None}
        return [eqn for eqn in self.jaxpr.eqns if id(eqn) in found]

    def maps(self, phase: int) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """The maps that the loop of a phase runs: its own, and those of earlier phases again."""
        maps = [eqn for eqn in self.computed(phase) if eqn.primitive is federated_map_p]
        own = {id(eqn) for eqn in self.loops[phase]}
        return [e for e in maps if id(e) in own], [e for e in maps if id(e) not in own]

    def chunk_size(self, phase: int) -> ChunkSize:
        """How many participants the loop runs at once: the setting that needs least memory."""
        own, again = self.maps(phase)
        settings = [eqn.params["chunk_size"] for eqn in (*own, *again)]
        numbers = [s for s in settings if isinstance(s, int)]
        return min(numbers) if numbers else ("auto" if "auto" in settings else None)

    @property
    def last(self) -> int:
        """The last phase."""
        return max([0, *self.server, *self.loops])

    def reads(self, phase: int) -> tuple[list[Var], list[Var]]:
        """What the loop of a phase reads: server values, and placed ones."""
        # A value may be both: broadcast, and handed out to the participants.
        shared, placed = dict[Var, None](), dict[Var, None]()
        for v, eqn in self.walk(phase):
            if eqn is None:
                kind = placed if aval_of(v).shape[:1] == (self.placement.size,) else shared
                kind[v] = None
            elif adds_participant_axis(eqn):
                shared.update((o, None) for o in self.operands(eqn) if isinstance(o, Var))
        # In the order of the arguments, so that results take the places of those they stand for.
        order = {v: i for i, v in enumerate(self.jaxpr.invars)}
        return list(shared), sorted(placed, key=lambda v: order.get(v, len(order)))

    def roots(self, phase: int) -> Iterator[Atom]:
        """The values that the loop of a phase is there to compute."""
        for eqn in self.reductions.get(phase, ()):
            yield from self.operands(eqn)
        yield from self.stored[phase]


def plan_phases(jaxpr: Jaxpr, placement: Placement) -> StreamingPlan:
    """Divides the equations of a jaxpr into phases.

    Args:
        jaxpr: a program's, with its plain calls written out.
        placement: whose participants run in the loops.

    Returns:
        The plan; without loops where no map of the placement runs at the top level.
    """
    plan = StreamingPlan(jaxpr, placement)
    size, axis = placement.size, explicit_axis(placement)
    others: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        operands = plan.operands(eqn)
        phase = max(map(plan.phase_of, operands), default=0)
        own = [isinstance(v, Var) and v in plan.producer for v in operands]
        if _is_map(eqn, placement):
            plan.loops.setdefault(phase, []).append(eqn)
            plan.stored.setdefault(phase, {})
            params: Params | None = eqn.params
        elif eqn.primitive in (federated_broadcast_p, federated_index_p) and _of(eqn, placement):
            params = eqn.params
        elif any(own):
            placed = [
                mine or (isinstance(v, Var) and aval_of(v).shape[:1] == (size,))
                for mine, v in zip(own, operands, strict=True)
            ]
            params = unstack(eqn, size, axis, placed)
        else:
            params = None
        if params is not None:
            for v in eqn.outvars:
                plan.producer[v] = eqn, params
                plan.phase[v] = phase
            is_map = eqn.primitive is federated_map_p
            if is_map or any(map(plan.is_mapped, operands)):
                plan.mapped.update(eqn.outvars)
                times = _remat_depth(plan, eqn, operands, phase)
                if times is not None:
                    plan.remat_depth.update((v, times) for v in eqn.outvars if v not in plan.extremum_operands)
            continue
        plan.phase.update(dict.fromkeys(eqn.outvars, plan.follows(eqn)))
        others.append(eqn)
    _pull_in(plan, others, axis)
    for eqn in others:
        operands = plan.operands(eqn)
        phase = plan.follows(eqn)
        # Fused where its loop can read all operands: weights may come from a later phase.
        fits = phase - 1 == max(map(plan.phase_of, operands), default=0)
        again = any(map(plan.is_rematerializable, operands))
        if plan.reduces(eqn) and fits and (again or phase - 1 in plan.loops):
            plan.loops.setdefault(phase - 1, [])
            plan.stored.setdefault(phase - 1, {})
            plan.reductions.setdefault(phase - 1, []).append(eqn)
            continue
        plan.server.setdefault(phase, []).append(eqn)
        for operand in operands:
            plan.store(operand, f"the server reads it in {eqn.primitive.name!r}")
    for out in jaxpr.outvars:
        plan.store(plan.resolve(out), "the program returns it")
    for phase in sorted(plan.loops, reverse=True):
        for v, computed in list(plan.walk(phase)):
            if computed is None:
                plan.store(v, "a later phase reads it, which needs a reduction first")
    return plan


def _remat_depth(plan: StreamingPlan, eqn: JaxprEqn, operands: Sequence[Atom], phase: int) -> int | None:
    """How many maps of different phases computing a result again takes; None if it may not be."""
    mapped = [v for v in operands if isinstance(v, Var) and plan.is_mapped(v)]
    if not all(map(plan.is_rematerializable, mapped)):
        return None
    if eqn.primitive is not federated_map_p:
        return max(plan.remat_depth[v] for v in mapped)
    if not is_rematerialized(eqn.params["jaxpr"]) and eqn.params["jaxpr"].jaxpr.eqns:
        return None
    times = max((plan.remat_depth[v] + (plan.phase_of(v) < phase) for v in mapped), default=1)
    # No state that maps hand on from phase to phase: every phase would begin with the first.
    return times if times <= MAX_REMAT_DEPTH else None


def _pull_in(plan: StreamingPlan, others: list[JaxprEqn], axis: str | None) -> None:
    """Moves into the loops what is done to placed arguments before, where nobody else needs it.

    So it does with values of the server that are spread over the participants by NumPy's rules.
    """
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
        if user is None or adds_participant_axis(user):
            return False
        if user.primitive in REDUCTIONS:
            return plan.reduces(user) and any(map(plan.is_mapped, plan.operands(user)))
        return bool(user.outvars) and user.outvars[0] in plan.producer

    for eqn in reversed(others):
        if not all(in_loops(user) for v in eqn.outvars for user in users.get(v, ())):
            continue
        operands = plan.operands(eqn)
        if adds_participant_axis(eqn):
            known = not any(isinstance(v, Var) and v in plan.producer for v in operands)
            params = unstack_broadcast(eqn, size, axis) if known else None
        else:
            placed = [isinstance(v, Var) and aval_of(v).shape[:1] == (size,) for v in operands]
            params = unstack(eqn, size, axis, placed)
        if params is not None:
            others.remove(eqn)
            plan.producer.update((v, (eqn, params)) for v in eqn.outvars)


def _is_map(eqn: JaxprEqn, placement: Placement) -> bool:
    # A map without results runs for its effects, and belongs to no reduction.
    return eqn.primitive is federated_map_p and _of(eqn, placement) and bool(eqn.outvars)


def _alias_forwarded(plan: StreamingPlan, eqn: JaxprEqn) -> None:
    """A map's result that is its argument needs no storing: residuals are often of this kind."""
    inner = eqn.params["jaxpr"].jaxpr
    if inner.effects:
        return  # it must run, and runs where its results are used
    position = {v: i for i, v in enumerate(inner.invars)}
    for outer, v in zip(eqn.outvars, inner.outvars, strict=True):
        if isinstance(v, Var) and v in position:
            plan.aliases[outer] = plan.operands(eqn)[position[v]]


def _of(eqn: JaxprEqn, placement: Placement) -> bool:
    return eqn.params.get("placement") == placement
