"""A plan that runs maps less often: a map waits for the phase that reads its results too."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Var
from fedpax.primitives.jaxpr_analysis import num_bytes
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.transforms.phases import plan_phases
from fedpax.transforms.streaming_plan import StreamingPlan


class PlanCost(NamedTuple):
    """The cost of the loops of a plan."""

    runs: Counter[int]  # id of the equation of a map -> number of loops that run it
    loops: int
    stored_bytes: int  # that loops store for all participants
    server_reductions: int  # that no loop accumulates
    read_bytes: int  # of placed values, once for each loop
    server_bytes: int  # of mapped values
    # id of an equation -> the largest chunk size of a loop that runs it. "auto" counts as 0,
    # because it adapts to the memory.
    chunk_sizes: dict[int, int]

    def is_below(self, other: "PlanCost") -> bool:
        """Return whether some field of `gains` decreases, and no field increases."""
        return (
            self.gains() != other.gains()
            and self.runs <= other.runs
            and self.loops <= other.loops
            and self.stored_bytes <= other.stored_bytes
            and self.server_reductions <= other.server_reductions
            and self.read_bytes <= other.read_bytes
            and self.server_bytes <= other.server_bytes
            and all(size <= other.chunk_sizes.get(e, size) for e, size in self.chunk_sizes.items())
        )

    def gains(self) -> tuple[Counter[int], int, int, int]:
        """Return the fields for which a map waits."""
        return self.runs, self.loops, self.stored_bytes, self.server_reductions


def make_plan(jaxpr: Jaxpr, placement: Placement) -> StreamingPlan:
    """Plan the loops of a jaxpr over the participants of a placement."""
    not_before: dict[int, int] = {}
    tried = set[tuple[int, int]]()
    best = plan_phases(jaxpr, placement)
    while (better := _postpone(best, not_before, tried)) is not None:
        best = better
    return best


def _postpone(
    best: StreamingPlan, not_before: dict[int, int], tried: set[tuple[int, int]]
) -> StreamingPlan | None:
    """Return a plan that costs less because a map waits, but for those tried; record it."""
    cost: PlanCost | None = None
    for phase, eqn in _run_again(best):
        if (phase, id(eqn)) in tried:
            continue
        tried.add((phase, id(eqn)))
        cost = cost or _cost(best)
        for group in ([eqn], _with_maps_before(best, eqn)):
            moved = not_before | {id(e): phase for e in group}
            plan = plan_phases(best.jaxpr, best.placement, moved)
            if _cost(plan).is_below(cost):
                not_before.update(moved)
                return plan
    return None


def _run_again(plan: StreamingPlan) -> Iterator[tuple[int, JaxprEqn]]:
    """Yield maps whose results a later phase reads, and the first phase that does."""
    repeated = set[int]()
    for phase in sorted(plan.loops):
        for v, _, _ in plan.walk(phase):
            eqn = plan.producer[v].eqn if plan.is_mapped(v) else None
            if eqn is None or eqn.primitive is not federated_map_p or id(eqn) in repeated:
                continue
            if plan.phase_of(v) < phase:
                repeated.add(id(eqn))
                yield phase, eqn


def _with_maps_before(plan: StreamingPlan, eqn: JaxprEqn) -> list[JaxprEqn]:
    """Return a map, and the maps of its phase that its arguments need."""
    phase = plan.phase_of(eqn.outvars[0])
    maps = dict[int, JaxprEqn]()
    waiting = [eqn]
    while waiting:
        needed = waiting.pop()
        if id(needed) in maps or plan.phase_of(needed.outvars[0]) < phase:
            continue
        maps[id(needed)] = needed
        mapped = (v for v in plan.operands(needed) if isinstance(v, Var) and plan.is_mapped(v))
        waiting += [plan.producer[v].eqn for v in mapped]
    return [needed for needed in maps.values() if needed.primitive is federated_map_p]


def _cost(plan: StreamingPlan) -> PlanCost:
    runs = Counter[int]()
    chunk_sizes: dict[int, int] = {}
    for phase in plan.loops:
        chunk = _chunk_size(plan, phase)
        for unstacked in plan.computed(phase):
            chunk_sizes[id(unstacked.eqn)] = max(chunk, chunk_sizes.get(id(unstacked.eqn), 0))
            runs[id(unstacked.eqn)] += unstacked.eqn.primitive is federated_map_p
    return PlanCost(
        runs=runs,
        loops=len(plan.loops),
        stored_bytes=sum(num_bytes(v) for values in plan.stored.values() for v in values),
        server_reductions=len(plan.candidates) - sum(map(len, plan.reductions.values())),
        read_bytes=sum(num_bytes(v) for phase in plan.loops for v in plan.loop_inputs(phase)[1]),
        server_bytes=sum(map(num_bytes, plan.on_server)),
        chunk_sizes=chunk_sizes,
    )


def _chunk_size(plan: StreamingPlan, phase: int) -> int:
    size = plan.chunk_size(phase)
    if size == "auto":
        return 0
    return plan.placement.size if size is None else size
