"""The plan of the streaming pass: which equations run in which loop over the participants.

The equations of a program are divided into phases. A phase is some work of the server, followed by
one loop over the participants. An operation that depends on the result of a reduction runs in a
later phase than the operands of that reduction.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Literal, Var, aval_of, is_rematerialized
from fedpax.primitives.broadcast import federated_broadcast_p, federated_index_p
from fedpax.primitives.layout import explicit_axis
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.max_min import federated_max_p, federated_min_p
from fedpax.primitives.placement import ChunkSize, Placement
from fedpax.transforms.loop_reductions import LoopReduction, loop_reduction
from fedpax.transforms.unstack import Unstacked, unstack
from fedpax.transforms.unstack_rules import AxisMap

Atom = Var | Literal

EXTREMA = (federated_max_p, federated_min_p)

# The longest chain of maps of different phases that a loop runs to rematerialize a value.
MAX_REMAT_DEPTH = 2


class StreamingPlan:
    """The loops over the participants of one placement in a jaxpr, and the server's work.

    A value is *mapped* if its computation contains a map. Values that a participant can compute
    without a map, such as broadcasts and scaled arguments, are computed wherever they are needed.

    Attributes:
        jaxpr: the jaxpr.
        placement: the placement.
        aliases: results of a map that are equal to one of its arguments.
        producer: value -> its equation, on the slices of one participant. It holds all values that
            a loop can compute.
        axis: value in `producer` -> its axis that lists the participants.
        mapped: the values in `producer` that need a map.
        remat_depth: value -> length of the chain of maps that a later phase runs to rematerialize
            it. Mapped values that are not listed are stored.
        extremum_operands: the operands of `federated_max` and `federated_min`. A later phase reads
            them from memory, because a recomputed value can round differently, and is then not
            equal to the extremum.
        phase: value -> its phase, if it is not phase 0.
        candidates: id of an equation -> the reduction that a loop can accumulate for it.
        loops: phase -> the maps of its loop. A phase that is not listed has no loop.
        reductions: phase -> the reductions that its loop accumulates.
        stored: phase -> the values that its loop stores for all participants, and the reasons.
            They are stored with the participants' axis first.
        on_server: the mapped values that the server computes for all participants, because their
            phase has no loop.
        server: phase -> the equations that the server runs before the loop.
        not_before: id of an equation -> the first phase in which it may run. Effects, such as
            callbacks, keep the order of the jaxpr.
    """

    def __init__(self, jaxpr: Jaxpr, placement: Placement, not_before: Mapping[int, int]):
        self.jaxpr = jaxpr
        self.not_before = dict(not_before)
        self.placement = placement
        self.aliases: dict[Var, Atom] = {}
        self.producer: dict[Var, Unstacked] = {}
        self.axis: dict[Var, int] = {}
        self.mapped: set[Var] = set()
        self.remat_depth: dict[Var, int] = {}
        for eqn in jaxpr.eqns:
            if _is_map(eqn, placement):
                _alias_forwarded_arguments(self, eqn)
        extrema = (eqn for eqn in jaxpr.eqns if eqn.primitive in EXTREMA)
        self.extremum_operands = {v for eqn in extrema for v in self.operands(eqn)}
        self.phase: dict[Var, int] = {}
        self.candidates: dict[int, LoopReduction] = {}
        self.loops: dict[int, list[JaxprEqn]] = {}
        self.reductions: dict[int, list[LoopReduction]] = {}
        self.stored: dict[int, dict[Var, str]] = {}
        self.on_server: set[Var] = set()
        self.server: dict[int, list[JaxprEqn]] = {}

    def resolve(self, v: Atom) -> Atom:
        """Resolve an alias."""
        while isinstance(v, Var) and v in self.aliases:
            v = self.aliases[v]
        return v

    def operands(self, eqn: JaxprEqn) -> list[Atom]:
        """Return the operands of an equation, with aliases resolved."""
        return [self.resolve(v) for v in eqn.invars]

    def known_axes(self, eqn: JaxprEqn) -> list[int | None]:
        """Return, for each operand that a loop can compute, the participants' axis."""
        return [self.axis.get(v) if isinstance(v, Var) else None for v in self.operands(eqn)]

    def phase_of(self, v: Atom) -> int:
        """Return the phase in which a value is computed."""
        return 0 if isinstance(v, Literal) else self.phase.get(v, 0)

    def is_mapped(self, v: Atom) -> bool:
        """Return whether computing a value needs a map."""
        return isinstance(v, Var) and v in self.mapped

    def is_rematerializable(self, v: Atom) -> bool:
        """Return whether a later loop can recompute a mapped value instead of reading it."""
        return isinstance(v, Var) and v in self.remat_depth

    def is_stored(self, v: Atom) -> bool:
        """Return whether a loop stores a value for all participants."""
        return isinstance(v, Var) and v in self.stored.get(self.phase_of(v), ())

    def is_read_from_memory(self, v: Atom, phase: int) -> bool:
        """Return whether the loop of a phase reads a mapped value that an earlier loop stored."""
        own = self.phase_of(v)
        if not self.is_mapped(v) or own >= phase or own not in self.loops:
            return False
        return not self.is_rematerializable(v) or self.is_stored(v)

    def server_phase(self, eqn: JaxprEqn) -> int:
        """Return the phase of an equation of the server: after the loops that it depends on."""
        operands = self.operands(eqn)
        if id(eqn) in self.candidates and any(map(self.is_rematerializable, operands)):
            return 1 + max(map(self.phase_of, operands))
        phases = [self.phase_of(v) + self.is_mapped(v) for v in operands]
        return max([*phases, self.not_before.get(id(eqn), 0)])

    def store(self, v: Atom, reason: str) -> None:
        """Record that a value is needed for all participants at once."""
        if isinstance(v, Literal) or v not in self.mapped:
            return
        phase = self.phase_of(v)
        if phase in self.loops:
            self.stored[phase].setdefault(v, reason)
            return
        self.on_server.add(v)
        for operand in self.operands(self.producer[v].eqn):
            self.store(operand, reason)

    def walk(self, phase: int) -> Iterator[tuple[Var, int | None, Unstacked | None]]:
        """Yield the values that the loop of a phase computes or reads.

        Returns:
            For each value its participants' axis (None: the whole value is read), and the equation
            that computes it (None: the loop reads it).
        """
        seen = set[tuple[Var, int | None]]()
        expanded = set[int]()
        waiting = list(self._roots(phase))
        while waiting:
            v, axis = waiting.pop()
            if isinstance(v, Literal) or (v, axis) in seen:
                continue
            seen.add((v, axis))
            if axis is None or v not in self.producer or self.is_read_from_memory(v, phase):
                yield v, axis, None
                continue
            one = self.producer[v]
            yield v, axis, one
            if id(one) not in expanded:  # once, and not for each result of a map
                expanded.add(id(one))
                waiting += zip(self.operands(one.eqn), one.axes.operands, strict=True)

    def _roots(self, phase: int) -> Iterator[tuple[Atom, int | None]]:
        """Yield the operands of the reductions of a loop, and the values that it stores."""
        for reduction in self.reductions.get(phase, ()):
            yield from zip(self.operands(reduction.eqn), reduction.axes, strict=True)
        for v in self.stored[phase]:
            yield v, self.axis[v]

    def computed(self, phase: int) -> list[Unstacked]:
        """Return the equations that the loop of a phase runs, in the order of the jaxpr."""
        found = {id(one.eqn): one for _, _, one in self.walk(phase) if one is not None}
        return [found[id(eqn)] for eqn in self.jaxpr.eqns if id(eqn) in found]

    def maps(self, phase: int) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """Return the maps of a loop: its own, and the rematerialized maps of earlier phases."""
        maps = [o.eqn for o in self.computed(phase) if o.eqn.primitive is federated_map_p]
        own = {id(eqn) for eqn in self.loops[phase]}
        return [e for e in maps if id(e) in own], [e for e in maps if id(e) not in own]

    def chunk_size(self, phase: int) -> ChunkSize:
        """Return the chunk size of a loop: the smallest among its maps."""
        own, rematerialized = self.maps(phase)
        settings = [eqn.params["chunk_size"] for eqn in (*own, *rematerialized)]
        numbers = [s for s in settings if isinstance(s, int)]
        return min(numbers) if numbers else ("auto" if "auto" in settings else None)

    @property
    def last_phase(self) -> int:
        """The last phase."""
        return max([0, *self.server, *self.loops])

    def is_placed_input(self, v: Atom, axis: int | None) -> bool:
        """Return whether a value with this axis is placed, and not a server value."""
        if isinstance(v, Literal) or axis is None:
            return False
        return v in self.producer or (axis == 0 and aval_of(v).shape[0] == self.placement.size)

    def loop_inputs(self, phase: int) -> tuple[list[Var], list[Var]]:
        """Return the values that the loop of a phase reads: server values, and placed values.

        A value can be in both lists.
        """
        shared, placed = dict[Var, None](), dict[Var, None]()
        for v, axis, one in self.walk(phase):
            if one is None:
                (placed if self.is_placed_input(v, axis) else shared)[v] = None
        # In the order of the arguments, so that results are written into the right ones.
        order = {v: i for i, v in enumerate(self.jaxpr.invars)}
        return list(shared), sorted(placed, key=lambda v: order.get(v, len(order)))


def plan_phases(
    jaxpr: Jaxpr,
    placement: Placement,
    not_before: Mapping[int, int] = MappingProxyType({}),
    computed_by_server: frozenset[Var] = frozenset(),
) -> StreamingPlan:
    """Divide the equations of a jaxpr into phases, each as early as its operands permit.

    Args:
        jaxpr: the jaxpr of a program, with its calls inlined.
        placement: the placement whose participants run in the loops.
        not_before: id of the equation of a map -> the first phase in which it may run.
        computed_by_server: values that no loop computes.

    Returns:
        The plan. It has no loops if the jaxpr has no map of the placement at its top level.
    """
    plan = StreamingPlan(jaxpr, placement, not_before)
    last_effect = 0  # twice its phase; one more in a loop, which follows the server's work
    size, mesh_axis = placement.size, explicit_axis(placement)
    others: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        operands, known = plan.operands(eqn), plan.known_axes(eqn)
        federated = eqn.params.get("placement") == placement
        # Federated equations work along axis 0. If the participants of an operand are on another
        # axis of the same size, the loop needs the whole value.
        swapped = {
            v
            for v, axis in zip(operands, known, strict=True)
            if federated and axis and isinstance(v, Var)
        }
        if swapped:
            return plan_phases(jaxpr, placement, not_before, computed_by_server | swapped)
        one: Unstacked | None = None
        if _is_map(eqn, placement):
            one = _federated(eqn, 0)
        elif federated and eqn.primitive in (federated_broadcast_p, federated_index_p):
            one = _federated(eqn, None)
        elif not computed_by_server.intersection(eqn.outvars) and known != [None] * len(known):
            one = unstack(eqn, size, mesh_axis, known)
        if one is not None:
            phase = max(_loop_phase(plan, one), not_before.get(id(eqn), 0))
            if eqn.effects:
                phase = max(phase, last_effect // 2)
                last_effect = 2 * phase + 1
            if _is_map(eqn, placement):
                plan.loops.setdefault(phase, []).append(eqn)
                plan.stored.setdefault(phase, {})
            _add_producer(plan, one)
            plan.phase.update(dict.fromkeys(eqn.outvars, phase))
            if eqn.primitive is federated_map_p or any(map(plan.is_mapped, operands)):
                plan.mapped.update(eqn.outvars)
                depth = _remat_depth(plan, eqn, operands, phase)
                if depth is not None:
                    own = (v for v in eqn.outvars if v not in plan.extremum_operands)
                    plan.remat_depth.update((v, depth) for v in own)
            continue
        reduction = loop_reduction(eqn, placement, mesh_axis, known)
        if reduction is not None:
            plan.candidates[id(eqn)] = reduction
        if eqn.effects:
            plan.not_before[id(eqn)] = -(-last_effect // 2)
            last_effect = 2 * plan.server_phase(eqn)
        plan.phase.update(dict.fromkeys(eqn.outvars, plan.server_phase(eqn)))
        others.append(eqn)
    _move_into_loops(plan, others, mesh_axis)
    for eqn in others:
        _assign(plan, eqn)
    for out in jaxpr.outvars:
        plan.store(plan.resolve(out), "the program returns it")
    for phase in sorted(plan.loops, reverse=True):
        for v, _, one in list(plan.walk(phase)):
            if one is None:
                plan.store(v, "a later phase reads it, after a reduction")
    return plan


def _assign(plan: StreamingPlan, eqn: JaxprEqn) -> None:
    """Assign an equation that no loop computes: to a loop that accumulates it, or to the server."""
    operands = plan.operands(eqn)
    phase = plan.server_phase(eqn)
    # The loop of the preceding phase can accumulate it if it has all operands. Weights can be the
    # result of a later phase.
    available = phase - 1 == max(map(plan.phase_of, operands), default=0)
    rematerializable = any(map(plan.is_rematerializable, operands))
    has_loop = rematerializable or phase - 1 in plan.loops
    if id(eqn) in plan.candidates and available and has_loop:
        plan.loops.setdefault(phase - 1, [])
        plan.stored.setdefault(phase - 1, {})
        plan.reductions.setdefault(phase - 1, []).append(plan.candidates[id(eqn)])
        return
    plan.server.setdefault(phase, []).append(eqn)
    for operand in operands:
        plan.store(operand, f"the server reads it in {eqn.primitive.name!r}")


def _loop_phase(plan: StreamingPlan, one: Unstacked) -> int:
    """Return the first phase whose loop can run an equation."""
    operands = zip(plan.operands(one.eqn), one.axes.operands, strict=True)
    # A mapped value that is broadcast as a whole comes from the loop of an earlier phase.
    return max(
        (plan.phase_of(v) + (a is None and plan.is_mapped(v)) for v, a in operands), default=0
    )


def _add_producer(plan: StreamingPlan, one: Unstacked) -> None:
    for v, axis in zip(one.eqn.outvars, one.axes.results, strict=True):
        assert axis is not None  # `unstack` returns no equation that combines participants
        plan.producer[v] = one
        plan.axis[v] = axis


def _federated(eqn: JaxprEqn, operand_axis: int | None) -> Unstacked:
    axes = AxisMap((operand_axis,) * len(eqn.invars), (0,) * len(eqn.outvars))
    return Unstacked(eqn, eqn.params, axes)


def _remat_depth(
    plan: StreamingPlan, eqn: JaxprEqn, operands: Sequence[Atom], phase: int
) -> int | None:
    """Return the length of the chain of maps to rematerialize a result; None: it is stored."""
    mapped = [v for v in operands if isinstance(v, Var) and plan.is_mapped(v)]
    if not all(map(plan.is_rematerializable, mapped)):
        return None
    if eqn.primitive is not federated_map_p:
        return max(plan.remat_depth[v] for v in mapped)
    if not is_rematerialized(eqn.params["jaxpr"]) and eqn.params["jaxpr"].jaxpr.eqns:
        return None
    depth = max((plan.remat_depth[v] + (plan.phase_of(v) < phase) for v in mapped), default=1)
    # A longer chain, such as a state that each phase updates, would start over in every phase.
    return depth if depth <= MAX_REMAT_DEPTH else None


def _move_into_loops(plan: StreamingPlan, others: list[JaxprEqn], mesh_axis: str | None) -> None:
    """Move equations of the server into the loops where only loops need their results.

    These are equations on placed arguments in front of a map, and server values that are broadcast
    along the participants' axis.
    """
    users: dict[Var, list[JaxprEqn | None]] = {}
    for eqn in plan.jaxpr.eqns:
        for v in plan.operands(eqn):
            if isinstance(v, Var):
                users.setdefault(v, []).append(eqn)
    for v in map(plan.resolve, plan.jaxpr.outvars):
        if isinstance(v, Var):
            users.setdefault(v, []).append(None)

    def axes_read(user: JaxprEqn | None, v: Var) -> set[int | None]:
        """Return the axes along which a user reads slices of a value; None: as a whole."""
        axes: Sequence[int | None]
        if user is None:
            return {None}
        if user.outvars and user.outvars[0] in plan.producer:
            axes = plan.producer[user.outvars[0]].axes.operands
        elif id(user) in plan.candidates and any(map(plan.is_mapped, plan.operands(user))):
            axes = plan.candidates[id(user)].axes
        else:
            return {None}
        pairs = zip(plan.operands(user), axes, strict=True)
        return {axis for operand, axis in pairs if operand == v}

    for eqn in reversed(others):
        axes = {a for v in eqn.outvars for user in users.get(v, ()) for a in axes_read(user, v)}
        if len(axes) != 1 or None in axes or any(a is not None for a in plan.known_axes(eqn)):
            continue
        unknown = [None] * len(eqn.invars)
        one = unstack(eqn, plan.placement.size, mesh_axis, unknown, result_axis=axes.pop())
        if one is not None:
            others.remove(eqn)
            _add_producer(plan, one)


def _is_map(eqn: JaxprEqn, placement: Placement) -> bool:
    # A map without results runs for its effects, and belongs to no reduction.
    same = eqn.params.get("placement") == placement
    return eqn.primitive is federated_map_p and same and bool(eqn.outvars)


def _alias_forwarded_arguments(plan: StreamingPlan, eqn: JaxprEqn) -> None:
    """Record the results of a map that are its arguments: residuals are often of this kind."""
    inner = eqn.params["jaxpr"].jaxpr
    if inner.effects:
        return  # the map must run, even if only these results are used
    operand = dict(zip(inner.invars, plan.operands(eqn), strict=True))
    for outer, v in zip(eqn.outvars, inner.outvars, strict=True):
        if isinstance(v, Var) and v in operand:
            plan.aliases[outer] = operand[v]
