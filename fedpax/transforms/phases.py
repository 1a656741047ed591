"""The division of a jaxpr into phases, which makes the plan of the streaming pass.

The equations of a program are divided into phases. A phase is some work of the server, followed by
one loop over the participants. An operation that depends on the result of a reduction runs in a
later phase than the operands of that reduction.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Var, is_rematerialized
from fedpax.primitives.broadcast import federated_broadcast_p, federated_index_p
from fedpax.primitives.layout import explicit_axis
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.transforms.loop_reductions import loop_reduction
from fedpax.transforms.streaming_plan import Atom, StreamingPlan, is_map
from fedpax.transforms.unstack import Unstacked, unstack
from fedpax.transforms.unstack_rules import AxisMap

# The longest chain of maps of different phases that a loop runs to rematerialize a value.
MAX_REMAT_DEPTH = 2


class EffectOrder(NamedTuple):
    """The place of an effect, such as a callback, among the phases.

    Attributes:
        phase: its phase.
        in_loop: whether it is in the loop of the phase, which follows the server's work.
    """

    phase: int
    in_loop: bool


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
    last_effect = EffectOrder(phase=0, in_loop=False)
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
        if is_map(eqn, placement):
            one = _federated(eqn, 0)
        elif federated and eqn.primitive in (federated_broadcast_p, federated_index_p):
            one = _federated(eqn, None)
        elif not computed_by_server.intersection(eqn.outvars) and known != [None] * len(known):
            one = unstack(eqn, size, mesh_axis, known)
        if one is not None:
            phase = max(_loop_phase(plan, one), not_before.get(id(eqn), 0))
            if eqn.effects:
                phase = max(phase, last_effect.phase)
                last_effect = EffectOrder(phase, in_loop=True)
            if is_map(eqn, placement):
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
            plan.not_before[id(eqn)] = last_effect.phase + last_effect.in_loop
            last_effect = EffectOrder(plan.server_phase(eqn), in_loop=False)
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
