"""The cost of a program: what it broadcasts, reduces, computes and stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    argument_names,
    aval_of,
    eliminate_dead_code,
    inner_jaxprs,
    result_names,
)
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.peak_memory import num_bytes
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.transforms.cost_table import Cost, PlacementCost, Transfer
from fedpax.transforms.flops import NO_FLOPS, Flops, equation_flops
from fedpax.transforms.inlining import inline, is_federated, placements_of
from fedpax.transforms.loop_reductions import LoopReduction
from fedpax.transforms.phases import StreamingPlan, plan_phases
from fedpax.transforms.sent import Sent, kept_values, sent_by_results, server_work


def cost(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Cost:
    """Count the bytes, FLOPs and memory of one execution of a program.

    Bytes are those of the federated operations: for each participant, the server values that it
    receives and the values that it sends. A server value that several maps read is received once.
    For islands, one on each device, they are the bytes of the operands of the compiled program's
    collectives along the placement's mesh axis. An aggregator's compressed values count as sent
    bytes if it marks them with `fedpax.aggregators.mark_sent`. Client states in a store are neither
    received nor sent: `gather_clients` and `scatter_clients` read and write what clients keep.

    `cost` traces the program, and compiles it for the devices of the current mesh (for the peak
    memory). It does not run it.

    Args:
        program: a function decorated with `fedpax.program`, or a function that calls decorated
            functions, such as the `round` of an algorithm or its gradient. If it is under
            `jax.jit`, its `donate_argnums` lower the peak memory.
        *args: the arguments of `program`: arrays, or `jax.ShapeDtypeStruct`s.
        **kwargs: the keyword arguments of `program`; likewise.

    Returns:
        The costs, as data. `print` shows a table.

    Raises:
        ValueError: the function calls no fedpax program.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=4)
        ... def gradient(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: jnp.tanh(x @ w), x))
        >>> costs = fedpax.cost(gradient, jnp.ones((3, 2)), jnp.ones((4, 3)))
        >>> clients = costs.placements["clients"]
        >>> clients.broadcast_bytes, clients.reduced_bytes, clients.flops
        (24, 8, 14.0)
        >>> print(str(costs).split("FLOPs")[0].rstrip())
        clients: 4 participants
          each receives       type          bytes
            w                 float32[3,2]     24
          each sends          type          bytes  sent
            mean of <lambda>  float32[2]        8     8
    """
    closed = jax.make_jaxpr(program)(*args, **kwargs)
    names = argument_names(closed)
    inlined = eliminate_dead_code(inline(closed, inside=lambda inner: inner))
    if not is_federated(inlined.jaxpr):
        raise ValueError(
            "cost(): the function has no federated_map, so there is no participant to count. Pass "
            "a function decorated with fedpax.program, or one that calls it, and its arguments."
        )
    counter = _Counter()
    server = counter.visit(inlined, dict(zip(inlined.jaxpr.invars, names, strict=True)), 1)
    jitted = program if hasattr(program, "lower") else jax.jit(program)
    memory = jitted.lower(*args, **kwargs).compile().memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return Cost(
        {name: found.finish(name) for name, found in counter.placements.items()},
        server.number,
        peak,
        server.is_exact and all(p.flops.is_exact for p in counter.placements.values()),
    )


@dataclasses.dataclass
class _Participant:
    """The costs of a participant, while they are counted."""

    size: int
    broadcast: list[Transfer] = dataclasses.field(default_factory=list)
    reduced: list[Transfer] = dataclasses.field(default_factory=list)
    flops: Flops = NO_FLOPS

    def finish(self, name: str) -> PlacementCost:
        return PlacementCost(
            name, self.size, tuple(self.broadcast), tuple(self.reduced), self.flops.number
        )


class _Counter:
    """Counts the costs of the participants of each placement, level by level."""

    def __init__(self) -> None:
        self.placements: dict[str, _Participant] = {}

    def visit(self, closed: ClosedJaxpr, names: dict[Var, str], executions: int) -> Flops:
        """Count one level of a program, and return the FLOPs of its server.

        Args:
            closed: a jaxpr with its calls inlined.
            names: the names of its arguments.
            executions: number of executions of the jaxpr.
        """
        jaxpr = closed.jaxpr
        by_participants: set[int] = set()
        server = NO_FLOPS
        for placement in placements_of(jaxpr):
            plan = plan_phases(jaxpr, placement)
            of_server, _ = server_work(plan)
            by_participants |= {id(one.eqn) for one in plan.producer.values()} - of_server
            self._count_placement(plan, placement, _Names(jaxpr, names), executions)
        for eqn in jaxpr.eqns:
            if id(eqn) in by_participants:
                continue
            if any(map(is_federated, inner_jaxprs(eqn))):
                server += self._visit_control_flow(eqn, executions)
            else:
                server += equation_flops(eqn).times(executions)
        return server

    def _visit_control_flow(self, eqn: JaxprEqn, executions: int) -> Flops:
        """Count the bodies of a loop, or the costliest branch of a conditional."""
        bodies = [eliminate_dead_code(ClosedJaxpr(j, ())) for j in inner_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            counters = [(_Counter(), body) for body in bodies]
            found = [(c.visit(body, {}, executions), c) for c, body in counters]
            server, costliest = max(found, key=lambda f: f[1].total())
            self._merge(costliest)
            return server
        if eqn.primitive.name == "scan":
            executions *= eqn.params["length"]
        server = sum((self.visit(body, {}, executions) for body in bodies), start=NO_FLOPS)
        return Flops(server.number, server.is_exact and eqn.primitive.name != "while")

    def _merge(self, other: _Counter) -> None:
        for name, theirs in other.placements.items():
            own = self.placements.setdefault(name, _Participant(theirs.size))
            own.broadcast += theirs.broadcast
            own.reduced += theirs.reduced
            own.flops += theirs.flops

    def total(self) -> tuple[float, float]:
        """Return bytes and FLOPs of all participants, to compare branches."""
        costs = [(p.finish(""), p.size) for p in self.placements.values()]
        return (
            sum(size * (c.broadcast_bytes + c.sent_bytes) for c, size in costs),
            sum(size * c.flops for c, size in costs),
        )

    def _count_placement(
        self, plan: StreamingPlan, placement: Placement, names: _Names, executions: int
    ) -> None:
        own = self.placements.setdefault(placement.name, _Participant(placement.size))
        of_server, _ = server_work(plan)
        work = [
            one
            for key, one in {id(one.eqn): one for one in plan.producer.values()}.items()
            if key not in of_server
        ]
        received: dict[Var, None] = {}
        reads, _ = kept_values(plan)
        for one in work:
            for v, axis in (
                ()
                if id(one.eqn) in reads
                else zip(plan.operands(one.eqn), one.axes.operands, strict=True)
            ):
                if axis is None and isinstance(v, Var):
                    received[v] = None
            if one.eqn.primitive is federated_map_p:
                inner = one.eqn.params["jaxpr"]
                if is_federated(inner.jaxpr):
                    inlined = eliminate_dead_code(inline(inner, inside=lambda j: j))
                    own.flops += self.visit(inlined, {}, executions)
                    for nested in placements_of(inlined.jaxpr):
                        found = self.placements[nested.name]
                        own.flops += found.flops.times(nested.size)
                else:
                    own.flops += equation_flops(one.eqn).times(1 / placement.size).times(executions)
            else:
                own.flops += equation_flops(one.eqn).times(executions / placement.size)
        for v in received:
            size = num_bytes(v)
            own.broadcast.append(
                Transfer(names.of(v), "broadcast", _type(v), size, size, executions)
            )
        own.reduced += _reduced(plan, names, executions)


def _reduced(plan: StreamingPlan, names: _Names, executions: int) -> Iterator[Transfer]:
    """Yield the values that a participant sends, the compressed ones last."""
    weighted: set[Var] = set()
    compressed: dict[Sent, str] = {}
    sent = sent_by_results(plan)
    _, gathered = kept_values(plan)  # the states that participants keep are not sent
    _, of_server = server_work(plan)
    for eqn in plan.jaxpr.eqns:
        reduction = plan.candidates.get(id(eqn))
        operands = [v for v in plan.operands(eqn) if isinstance(v, Var)]
        if any(v in plan.producer for v in eqn.outvars) or of_server.intersection(operands):
            continue
        if reduction is not None:
            first, *weights = operands
            codes = sent.get(first, ())
            operation = eqn.primitive.name.removeprefix("federated_").removeprefix("reduce_")
            name = f"{operation} of {names.of(first)}"
            compressed |= {code: name for code in codes if code not in compressed}
            term, *others = _term_bytes(plan, reduction)
            if not codes:
                yield Transfer(name, operation, _type(first, 1), term, term, executions)
            if eqn.primitive in REDUCTIONS and weights and weights[0] not in weighted:
                weighted.add(weights[0])
                kind = _type(weights[0], 1)
                name = f"sum of {names.of(weights[0])}"
                yield Transfer(name, "sum", kind, sum(others), sum(others), executions)
            continue
        gathered |= _read_by_participants_alone(plan, eqn)
        for v in operands:
            if v in plan.producer and plan.is_mapped(v) and v not in gathered:
                gathered.add(v)
                codes = sent.get(v, ())
                compressed |= {c: f"gather of {names.of(v)}" for c in codes if c not in compressed}
                if not codes:
                    size = num_bytes(v) // plan.placement.size
                    name = f"gather of {names.of(v)}"
                    yield Transfer(name, "gather", _type(v, 1), size, size, executions)
    for code, name in compressed.items():
        operation = name.split()[0]
        yield Transfer(
            name, operation, code.type, code.before, code.num_bytes, code.executions * executions
        )


def _read_by_participants_alone(plan: StreamingPlan, loop: JaxprEqn) -> set[Var]:
    """Return the constants of a loop that its server does not read: they need no gather."""
    if loop.primitive.name != "scan":
        return set()
    body, num_consts = loop.params["jaxpr"].jaxpr, loop.params["num_consts"]
    if not placements_of(body):
        return set()
    inner = plan_phases(body, plan.placement)
    by_server = {v for v in body.outvars if isinstance(v, Var)}
    for eqn in reversed(body.eqns):
        if eqn.primitive is federated_map_p or id(eqn) in inner.candidates:
            continue
        if not any(v in inner.producer for v in eqn.outvars) or by_server.intersection(eqn.outvars):
            by_server.update(v for v in inner.operands(eqn) if isinstance(v, Var))
    operands = plan.operands(loop)
    constants = zip(operands[:num_consts], body.invars, strict=False)
    kept = {v for v, own in constants if isinstance(v, Var) and own not in by_server}
    return kept.difference(v for v in operands[num_consts:] if isinstance(v, Var))


def _term_bytes(plan: StreamingPlan, reduction: LoopReduction) -> list[int]:
    """Return the bytes of the terms of a reduction that one participant sends."""
    ones = []
    for v, axis in zip(reduction.eqn.invars, reduction.axes, strict=True):
        aval = aval_of(v)
        shape = tuple(1 if i == axis else size for i, size in enumerate(aval.shape))
        ones.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    terms = jax.eval_shape(reduction.terms, *ones)
    return [term.size * term.dtype.itemsize for term in terms]


class _Names:
    """Names of the values of a jaxpr, for the reader of a table."""

    def __init__(self, jaxpr: Jaxpr, arguments: dict[Var, str]):
        self.names = dict(arguments)
        for eqn in jaxpr.eqns:
            paths = result_names(eqn.params["jaxpr"]) if eqn.primitive is federated_map_p else None
            for i, v in enumerate(eqn.outvars):
                if paths is not None:
                    self.names[v] = paths[i]
                    continue
                operands = [a for a in eqn.invars if isinstance(a, Var)]
                known = [self.names[a] for a in operands if a in self.names]
                own = eqn.params.get("name") or eqn.primitive.name
                self.names[v] = known[0] if len(known) == 1 else own

    def of(self, v: Var | Literal) -> str:
        return self.names.get(v, "constant") if isinstance(v, Var) else "constant"


def _type(v: Var | Literal, placed: int = 0) -> str:
    """Return dtype and shape of a value; of one participant's slice if `placed` is 1."""
    aval = aval_of(v)
    return f"{aval.dtype}[{','.join(map(str, aval.shape[placed:]))}]"
