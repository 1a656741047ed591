"""The server's work of a plan, in parts between the loops over participants."""

from collections.abc import Iterator, Sequence
from typing import Any

from fedpax.primitives._jax import Literal, Var
from fedpax.transforms.streaming import finish_reductions, run_server, whole_value
from fedpax.transforms.streaming_plan import Atom, StreamingPlan


class ServerParts:
    """The server's work between loops: part s runs between the loops of phases s - 1 and s.

    `inputs` are the values that a part needs and does not compute, and `results` its values that
    other parts or loops need, or the program returns.
    """

    def __init__(self, plan: StreamingPlan) -> None:
        self.plan = plan
        self.number = plan.last_phase + 2
        self.outputs = [plan.resolve(v) for v in plan.jaxpr.outvars]
        self.inputs = [self._inputs(part) for part in range(self.number)]
        self.results = [self._results(part) for part in range(self.number)]

    def run(self, part: int, inputs: Sequence[Any], totals: Sequence[Any]) -> list[Any]:
        """Run a part."""
        values = dict(zip(self.inputs[part], inputs, strict=True))
        if part - 1 in self.plan.loops:
            values.update(finish_reductions(self.plan, part - 1, totals))
        run_server(self.plan, part, values)
        return [whole_value(self.plan, values, v) for v in self.results[part]]

    def _sources(self, v: Atom) -> Iterator[Var]:
        """Yield the values that `v`, as a whole, is computed from; itself if it is stored."""
        if isinstance(v, Literal):
            return
        if v not in self.plan.producer or self.plan.is_stored(v):
            yield v
            return
        for operand in self.plan.operands(self.plan.producer[v].eqn):
            yield from self._sources(operand)

    def _inputs(self, part: int) -> list[Var]:
        """Return the values that a part needs and does not compute."""
        wanted: list[Atom] = [*self._on_demand(part)]
        for eqn in self.plan.server.get(part, ()):
            wanted += self.plan.operands(eqn)
        sources = dict.fromkeys(source for v in wanted for source in self._sources(v))
        return [v for v in sources if v not in self._computed(part)]

    def _results(self, part: int) -> list[Var]:
        """Return the values of a part that other parts or loops need, or the program returns."""
        computed = self._computed(part)
        others = [p for p in range(self.number) if p != part]
        wanted = [v for p in others for v in self.inputs[p]]
        for phase in self.plan.loops:
            shared, placed = self.plan.loop_inputs(phase)
            wanted += [*shared, *placed]
        wanted += [v for v in self.outputs if isinstance(v, Var)]
        return [*(v for v in dict.fromkeys(wanted) if v in computed), *self._on_demand(part)]

    def _on_demand(self, part: int) -> list[Var]:
        """Return values, such as broadcasts, that a part computes only for a loop or a result."""
        wanted: list[Atom] = []
        if part in self.plan.loops:
            wanted += self.plan.loop_inputs(part)[0]
        if part == self.number - 1:
            wanted += self.outputs
        values = dict.fromkeys(v for v in wanted if isinstance(v, Var))
        return [v for v in values if list(self._sources(v)) != [v]]

    def _computed(self, part: int) -> set[Var]:
        reductions = self.plan.reductions.get(part - 1, ())
        eqns = [*self.plan.server.get(part, ()), *(r.eqn for r in reductions)]
        return {v for eqn in eqns for v in eqn.outvars}
