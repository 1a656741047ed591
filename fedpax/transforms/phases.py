"""The division of a jaxpr into phases, which makes the plan of the streaming pass.

A phase is work of the server and one loop over the participants: a reduction's result is read in a
later phase than its operands.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Literal, Var
from fedpax.primitives.broadcast import federated_broadcast_p, federated_index_p
from fedpax.primitives.jaxpr_analysis import is_rematerialized
from fedpax.primitives.layout import explicit_axis
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.max_min import federated_max_p, federated_min_p
from fedpax.primitives.placement import Placement
from fedpax.transforms.streaming_plan import Atom, StreamingPlan, is_map
from fedpax.transforms.unstack import Unstacked, loop_reduction, unstack
from fedpax.transforms.unstack_rules import AxisMap

# The longest chain of maps of different phases that a loop runs to rematerialize a value.
MAX_REMAT_DEPTH = 2


EXTREMA = (federated_max_p, federated_min_p)


class EffectOrder(NamedTuple):
    """The place of an effect, such as a callback, among the phases."""

    phase: int
    in_loop: bool  # whether it is in the loop of the phase, which follows the server's work


def plan_phases(
    jaxpr: Jaxpr,
    placement: Placement,
    not_before: Mapping[int, int] = MappingProxyType({}),
    computed_by_server: frozenset[Var] = frozenset(),
) -> StreamingPlan:
    """Divide the equations of a jaxpr into phases, each as early as its operands permit."""
    builder = _PlanBuilder(jaxpr, placement, not_before, computed_by_server)
    for eqn in jaxpr.eqns:
        if swapped := builder.operands_on_another_axis(eqn):
            return plan_phases(jaxpr, placement, not_before, computed_by_server | swapped)
        builder.add(eqn)
    return builder.build()


class _PlanBuilder:
    """Makes a plan, equation by equation, in the order of the jaxpr."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        placement: Placement,
        not_before: Mapping[int, int],
        computed_by_server: frozenset[Var],
    ) -> None:
        self._mesh_axis = explicit_axis(placement)
        # Effects, such as callbacks, keep the order of the jaxpr.
        self._not_before = dict(not_before)
        self._last_effect = EffectOrder(phase=0, in_loop=False)
        self._computed_by_server = computed_by_server
        self._others: list[JaxprEqn] = []  # equations that no loop computes
        self.plan = StreamingPlan(jaxpr, placement)
        for eqn in jaxpr.eqns:
            if is_map(eqn, placement):
                self._alias_forwarded_arguments(eqn)
        # Later phases read these from memory: a recomputed value can round differently, and is then
        # not equal to the extremum.
        extrema = (eqn for eqn in jaxpr.eqns if eqn.primitive in EXTREMA)
        self._extremum_operands = {v for eqn in extrema for v in self.plan.operands(eqn)}

    def _alias_forwarded_arguments(self, eqn: JaxprEqn) -> None:
        """Record the results of a map that are its arguments: residuals are often of this kind."""
        inner = eqn.params["jaxpr"].jaxpr
        if inner.effects:
            return  # the map must run, even if only these results are used
        operand = dict(zip(inner.invars, self.plan.operands(eqn), strict=True))
        for outer, v in zip(eqn.outvars, inner.outvars, strict=True):
            if isinstance(v, Var) and v in operand:
                self.plan.aliases[outer] = operand[v]

    def operands_on_another_axis(self, eqn: JaxprEqn) -> frozenset[Var]:
        """Return operands of a federated equation whose participants are not on axis 0."""
        if eqn.params.get("placement") != self.plan.placement:
            return frozenset()
        pairs = zip(self.plan.operands(eqn), self._known_axes(eqn), strict=True)
        return frozenset(v for v, axis in pairs if axis and isinstance(v, Var))

    def add(self, eqn: JaxprEqn) -> None:
        """Plan the next equation: the phase of the loop that can compute it, or of the server."""
        unstacked = self._unstack(eqn)
        if unstacked is not None:
            self._add_to_loop(unstacked)
            return
        known = self._known_axes(eqn)
        reduction = loop_reduction(eqn, self.plan.placement, self._mesh_axis, known)
        if reduction is not None:
            self.plan.candidates[id(eqn)] = reduction
        if eqn.effects:
            self._not_before[id(eqn)] = self._last_effect.phase + self._last_effect.in_loop
            self._last_effect = EffectOrder(self._server_phase(eqn), in_loop=False)
        self.plan.phase.update(dict.fromkeys(eqn.outvars, self._server_phase(eqn)))
        self._others.append(eqn)

    def _unstack(self, eqn: JaxprEqn) -> Unstacked | None:
        """Return an equation on the slices of one participant, or None if no loop computes it."""
        if is_map(eqn, self.plan.placement):
            return _federated(eqn, 0)
        if (
            eqn.primitive in (federated_broadcast_p, federated_index_p)
            and eqn.params["placement"] == self.plan.placement
        ):
            return _federated(eqn, None)
        known = self._known_axes(eqn)
        if self._computed_by_server.intersection(eqn.outvars) or known == [None] * len(known):
            return None
        return unstack(eqn, self.plan.placement.size, self._mesh_axis, known)

    def _known_axes(self, eqn: JaxprEqn) -> list[int | None]:
        """Return, for each operand that a loop can compute, the participants' axis."""
        operands = self.plan.operands(eqn)
        return [self.plan.axis.get(v) if isinstance(v, Var) else None for v in operands]

    def _add_to_loop(self, unstacked: Unstacked) -> None:
        plan, eqn = self.plan, unstacked.eqn
        operands = plan.operands(eqn)
        phase = max(_loop_phase(plan, unstacked), self._not_before.get(id(eqn), 0))
        if eqn.effects:
            phase = max(phase, self._last_effect.phase)
            self._last_effect = EffectOrder(phase, in_loop=True)
        if is_map(eqn, plan.placement):
            self.plan.loops.setdefault(phase, []).append(eqn)
            self.plan.stored.setdefault(phase, {})
        self._add_producer(unstacked)
        self.plan.phase.update(dict.fromkeys(eqn.outvars, phase))
        if eqn.primitive is federated_map_p or any(map(plan.is_mapped, operands)):
            self.plan.mapped.update(eqn.outvars)
            depth = _remat_depth(plan, eqn, operands, phase)
            if depth is not None:
                results = (v for v in eqn.outvars if v not in self._extremum_operands)
                self.plan.remat_depth.update((v, depth) for v in results)

    def _add_producer(self, unstacked: Unstacked) -> None:
        for v, axis in zip(unstacked.eqn.outvars, unstacked.axes.results, strict=True):
            assert axis is not None  # `unstack` returns no equation that combines participants
            self.plan.producer[v] = unstacked
            self.plan.axis[v] = axis

    def _server_phase(self, eqn: JaxprEqn) -> int:
        """Return the phase of an equation of the server: after the loops that it depends on."""
        plan, operands = self.plan, self.plan.operands(eqn)
        if id(eqn) in self.plan.candidates and any(map(plan.is_rematerializable, operands)):
            return 1 + max(map(plan.phase_of, operands))
        phases = [plan.phase_of(v) + plan.is_mapped(v) for v in operands]
        return max([*phases, self._not_before.get(id(eqn), 0)])

    def build(self) -> StreamingPlan:
        """Assign the equations that no loop computes, and store what must be; return the plan."""
        plan = self.plan
        self._move_into_loops()
        for eqn in self._others:
            self._assign(eqn)
        for out in plan.jaxpr.outvars:
            self._store(plan.resolve(out), "the program returns it")
        for phase in sorted(plan.loops, reverse=True):
            for v, _, unstacked in list(plan.walk(phase)):
                if unstacked is None:
                    self._store(v, "a later phase reads it, after a reduction")
        return plan

    def _move_into_loops(self) -> None:
        """Move equations of the server into the loops where only loops need their results."""
        users = self._users()
        for eqn in reversed(self._others):
            axes = {
                axis
                for v in eqn.outvars
                for user in users.get(v, ())
                for axis in self._axes_read(user, v)
            }
            if len(axes) != 1 or None in axes or any(a is not None for a in self._known_axes(eqn)):
                continue
            size, unknown = self.plan.placement.size, [None] * len(eqn.invars)
            unstacked = unstack(eqn, size, self._mesh_axis, unknown, result_axis=axes.pop())
            if unstacked is not None:
                self._others.remove(eqn)
                self._add_producer(unstacked)

    def _users(self) -> dict[Var, list[JaxprEqn | None]]:
        """Return the equations that read each value; None: the program returns it."""
        users: dict[Var, list[JaxprEqn | None]] = {}
        for eqn in self.plan.jaxpr.eqns:
            for v in self.plan.operands(eqn):
                if isinstance(v, Var):
                    users.setdefault(v, []).append(eqn)
        for v in map(self.plan.resolve, self.plan.jaxpr.outvars):
            if isinstance(v, Var):
                users.setdefault(v, []).append(None)
        return users

    def _axes_read(self, user: JaxprEqn | None, v: Var) -> set[int | None]:
        """Return the axes along which a user reads slices of a value; None: as a whole."""
        axes: Sequence[int | None]
        if user is None:
            return {None}
        operands = self.plan.operands(user)
        if user.outvars and user.outvars[0] in self.plan.producer:
            axes = self.plan.producer[user.outvars[0]].axes.operands
        elif id(user) in self.plan.candidates and any(map(self.plan.is_mapped, operands)):
            axes = self.plan.candidates[id(user)].axes
        else:
            return {None}
        return {axis for operand, axis in zip(operands, axes, strict=True) if operand == v}

    def _assign(self, eqn: JaxprEqn) -> None:
        """Assign an equation to a loop that accumulates it, or to the server."""
        plan, operands = self.plan, self.plan.operands(eqn)
        phase = self._server_phase(eqn)
        # The loop of the preceding phase can accumulate it if it has all operands, weights too.
        available = phase - 1 == max(map(plan.phase_of, operands), default=0)
        has_loop = any(map(plan.is_rematerializable, operands)) or phase - 1 in plan.loops
        if id(eqn) in plan.candidates and available and has_loop:
            self.plan.loops.setdefault(phase - 1, [])
            self.plan.stored.setdefault(phase - 1, {})
            self.plan.reductions.setdefault(phase - 1, []).append(plan.candidates[id(eqn)])
            return
        self.plan.server.setdefault(phase, []).append(eqn)
        for operand in operands:
            self._store(operand, f"the server reads it in {eqn.primitive.name!r}")

    def _store(self, v: Atom, reason: str) -> None:
        """Record that a value is needed for all participants at once."""
        if isinstance(v, Literal) or v not in self.plan.mapped:
            return
        phase = self.plan.phase_of(v)
        if phase in self.plan.loops:
            self.plan.stored[phase].setdefault(v, reason)
            return
        self.plan.on_server.add(v)
        for operand in self.plan.operands(self.plan.producer[v].eqn):
            self._store(operand, reason)


def _loop_phase(plan: StreamingPlan, unstacked: Unstacked) -> int:
    """Return the first phase whose loop can run an equation."""
    operands = zip(plan.operands(unstacked.eqn), unstacked.axes.operands, strict=True)
    # A mapped value that is broadcast as a whole comes from the loop of an earlier phase.
    return max(
        (plan.phase_of(v) + (a is None and plan.is_mapped(v)) for v, a in operands), default=0
    )


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
