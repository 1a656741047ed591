"""The plan of the streaming pass: which equations run in which loop over the participants."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Literal, Var, aval_of
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import ChunkSize, Placement
from fedpax.transforms.unstack import LoopReduction, Unstacked

Atom = Var | Literal


@dataclass(frozen=True, eq=False)
class StreamingPlan:
    """The loops over participants in a jaxpr; a value is *mapped* if it needs a map."""

    jaxpr: Jaxpr
    placement: Placement
    # results of a map -> equal argument
    aliases: dict[Var, Atom] = field(default_factory=dict)
    # value -> its equation on the slices of one participant, for all that a loop can compute
    producer: dict[Var, Unstacked] = field(default_factory=dict)
    # value -> its axis of the participants
    axis: dict[Var, int] = field(default_factory=dict)
    mapped: set[Var] = field(default_factory=set)  # that need a map
    # value -> length of the chain of maps that a later phase runs to rematerialize it; other mapped
    # values are stored
    remat_depth: dict[Var, int] = field(default_factory=dict)
    phase: dict[Var, int] = field(default_factory=dict)  # value -> its phase, if it is not phase 0
    # id of an equation -> the reduction that a loop can accumulate for it
    candidates: dict[int, LoopReduction] = field(default_factory=dict)
    # phase -> the maps of its loop; without an entry there is no loop
    loops: dict[int, list[JaxprEqn]] = field(default_factory=dict)
    # phase -> reductions
    reductions: dict[int, list[LoopReduction]] = field(default_factory=dict)
    # phase -> the values that its loop stores for all participants, their axis first, and the
    # reasons
    stored: dict[int, dict[Var, str]] = field(default_factory=dict)
    # the mapped values that the server computes, because their phase has no loop
    on_server: set[Var] = field(default_factory=set)
    # before the loop of a phase
    server: dict[int, list[JaxprEqn]] = field(default_factory=dict)

    def resolve(self, v: Atom) -> Atom:
        """Resolve an alias."""
        while isinstance(v, Var) and v in self.aliases:
            v = self.aliases[v]
        return v

    def operands(self, eqn: JaxprEqn) -> list[Atom]:
        """Return the operands of an equation, with aliases resolved."""
        return [self.resolve(v) for v in eqn.invars]

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

    def walk(self, phase: int) -> Iterator[tuple[Var, int | None, Unstacked | None]]:
        """Yield the values that the loop of a phase computes or reads."""
        # Each with its participants' axis (None: read as a whole), and its equation (None: read).
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
            unstacked = self.producer[v]
            yield v, axis, unstacked
            if id(unstacked) not in expanded:  # once, and not for each result of a map
                expanded.add(id(unstacked))
                waiting += zip(self.operands(unstacked.eqn), unstacked.axes.operands, strict=True)

    def _roots(self, phase: int) -> Iterator[tuple[Atom, int | None]]:
        """Yield the operands of the reductions of a loop, and the values that it stores."""
        for reduction in self.reductions.get(phase, ()):
            yield from zip(self.operands(reduction.eqn), reduction.axes, strict=True)
        for v in self.stored[phase]:
            yield v, self.axis[v]

    def computed(self, phase: int) -> list[Unstacked]:
        """Return the equations that the loop of a phase runs, in the order of the jaxpr."""
        unstacked_of = {
            id(unstacked.eqn): unstacked
            for _, _, unstacked in self.walk(phase)
            if unstacked is not None
        }
        return [unstacked_of[id(eqn)] for eqn in self.jaxpr.eqns if id(eqn) in unstacked_of]

    def maps(self, phase: int) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """Return the maps of a loop: its own, and the rematerialized maps of earlier phases."""
        maps = [o.eqn for o in self.computed(phase) if o.eqn.primitive is federated_map_p]
        inside = {id(eqn) for eqn in self.loops[phase]}
        return [e for e in maps if id(e) in inside], [e for e in maps if id(e) not in inside]

    def chunk_size(self, phase: int) -> ChunkSize:
        """Return the chunk size of a loop: the smallest among its maps."""
        kept, rematerialized = self.maps(phase)
        settings = [eqn.params["chunk_size"] for eqn in (*kept, *rematerialized)]
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
        """Return the server values and the placed values that the loop of a phase reads."""
        shared, placed = dict[Var, None](), dict[Var, None]()
        for v, axis, unstacked in self.walk(phase):
            if unstacked is None:
                (placed if self.is_placed_input(v, axis) else shared)[v] = None
        # In the order of the arguments, so that results are written into the right ones.
        order = {v: i for i, v in enumerate(self.jaxpr.invars)}

        def in_order(values: dict[Var, None]) -> list[Var]:
            return sorted(values, key=lambda v: order.get(v, len(order)))

        return in_order(shared), in_order(placed)


def is_map(eqn: JaxprEqn, placement: Placement) -> bool:
    """Return whether an equation is a map of a placement that has results."""
    # A map without results runs for its effects, and belongs to no reduction.
    same = eqn.params.get("placement") == placement
    return eqn.primitive is federated_map_p and same and bool(eqn.outvars)
