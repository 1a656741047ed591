"""The cost of a program: what it broadcasts, reduces, computes and stores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from fedpax.errors import ArgumentError
from fedpax.inspect.sent_marks import kept_values, server_work
from fedpax.inspect.transfers import Cost, PlacementCost, Transfer, sends_in_while, sent_values
from fedpax.primitives._jax import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    argument_names,
    aval_of,
    eliminate_dead_code,
)
from fedpax.primitives.jaxpr_analysis import inner_jaxprs, num_bytes
from fedpax.primitives.layout import describe_axis, find_mesh
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.transforms.inlining import inline, is_federated, placements_of
from fedpax.transforms.placed_values import PlacedValues, bodies_of
from fedpax.transforms.value_names import Names, type_of

# One operation for each element of the result.
ELEMENTWISE = frozenset(
    [
        *("abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh"),
        *("cbrt", "ceil", "clamp", "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc"),
        *("exp", "exp2", "expm1", "floor", "integer_pow", "lgamma", "log", "log1p", "logistic"),
        *("max", "min", "mul", "neg", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin"),
        *("sinh", "sqrt", "square", "sub", "tan", "tanh"),
    ]
)
# One operation for each element of the first operand.
CUMULATIVE = frozenset(
    [
        *("argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"),
        *("reduce_max", "reduce_min", "reduce_prod", "reduce_sum"),
        *("reduce_window_max", "reduce_window_sum", "scatter-add"),
    ]
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations, and whether all loops were counted."""

    number: float = 0
    is_exact: bool = True

    def __add__(self, other: Flops) -> Flops:
        """Add two counts."""
        return Flops(self.number + other.number, self.is_exact and other.is_exact)

    def times(self, factor: float) -> Flops:
        """Multiply a count."""
        return Flops(self.number * factor, self.is_exact)


NO_FLOPS = Flops()


def count_flops(jaxpr: Jaxpr) -> Flops:
    """Count the floating-point operations of a jaxpr: 2 in a matmul for each product, else 1."""
    # A loop of unknown length counts once, a conditional its costliest branch. Integers,
    # comparisons and custom kernels count 0.
    return sum((equation_flops(eqn) for eqn in jaxpr.eqns), start=NO_FLOPS)


def equation_flops(eqn: JaxprEqn) -> Flops:
    """Count the floating-point operations of one equation. See `count_flops`."""
    name = eqn.primitive.name
    inner = list(inner_jaxprs(eqn))
    if eqn.primitive is federated_map_p:
        return count_flops(inner[0]).times(eqn.params["placement"].size)
    if name == "scan":
        return count_flops(inner[0]).times(eqn.params["length"])
    if name == "while":
        number = sum(count_flops(body).number for body in inner)
        return Flops(number, is_exact=not number)
    if name == "cond":
        return max((count_flops(branch) for branch in inner), key=lambda flops: flops.number)
    if inner and name not in ("custom_jvp_call", "custom_vjp_call", "pallas_call"):
        return sum(map(count_flops, inner), start=NO_FLOPS)
    if inner and name != "pallas_call":
        return count_flops(inner[0])
    if not any(_is_float(v) for v in eqn.outvars):
        return NO_FLOPS
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = aval_of(eqn.invars[0]).shape
        return Flops(2 * _size(eqn.outvars[0]) * math.prod(shape[i] for i in contracted))
    if name == "ragged_dot_general":
        return Flops(2 * _size(eqn.outvars[0]) * aval_of(eqn.invars[0]).shape[-1])
    if name == "conv_general_dilated":
        kernel, spec = aval_of(eqn.invars[1]).shape, eqn.params["dimension_numbers"].rhs_spec
        # The kernel's axes: output features, input features of a group, and the spatial axes.
        return Flops(2 * _size(eqn.outvars[0]) * math.prod(kernel) // kernel[spec[0]])
    if name in CUMULATIVE or eqn.primitive in REDUCTIONS:
        return Flops(_size(eqn.invars[0]))
    return Flops(_size(eqn.outvars[0])) if name in ELEMENTWISE else NO_FLOPS


def _size(v: Var | Literal) -> int:
    return math.prod(aval_of(v).shape)


def _is_float(v: Var | Literal) -> bool:
    dtype = getattr(aval_of(v), "dtype", None)  # a token has none, and a PRNG key's has no kind
    return getattr(dtype, "kind", None) in ("f", "c", "V")


def cost(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Cost:
    """Count the bytes, FLOPs and memory of one execution of a program.

    Bytes are counted for the federated operations: for each participant, the server values that it
    receives (each once) and the values that it sends. A value that passes from one map to another,
    or that the program returns for each participant, is not sent. For islands, one on each device,
    they are the operand bytes of the compiled collectives along the placement's mesh axis.
    Compressed values count as sent bytes if the aggregator marks them with
    `fedpax.aggregators.mark_sent`. Client states in a store do not count.

    The program is traced, and compiled for the devices of the current mesh (for the peak memory).
    It does not run.

    Args:
        program: a function decorated with `fedpax.program`, or one that calls such functions, such
            as the `round` of an algorithm or its gradient. `donate_argnums` of its `jax.jit` lower
            the peak memory.
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
        raise ArgumentError(
            "cost(): the function has no federated_map, so there is no participant to count. Pass "
            "a function decorated with fedpax.program, or one that calls it, and its arguments."
        )
    counter = _Counter()
    arguments = {
        v: [(name, type_of(v))] for v, name in zip(inlined.jaxpr.invars, names, strict=True)
    }
    server = counter.visit(inlined.jaxpr, Names(inlined.jaxpr, arguments), 1, {})
    jitted = program if hasattr(program, "lower") else jax.jit(program)
    memory = jitted.lower(*args, **kwargs).compile().memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
        - memory.alias_size_in_bytes
    )
    mesh = find_mesh(closed.in_avals)
    return Cost(
        {
            name: dataclasses.replace(counts.finish(name), where=describe_axis(name, mesh))
            for name, counts in counter.placements.items()
        },
        server.number,
        peak,
        server.is_exact and all(p.flops.is_exact for p in counter.placements.values()),
    )


# The arguments of a jaxpr that are placed, with their participants' axis, and those that are fixed.
Placed = tuple[dict[Var, int], set[Var]]


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

    def visit(
        self, jaxpr: Jaxpr, names: Names, executions: int, arguments: dict[Placement, Placed]
    ) -> Flops:
        """Count one level of a program, and return the FLOPs of its server."""
        by_participants: set[int] = set()
        levels: list[PlacedValues] = []
        server = NO_FLOPS
        for placement in dict.fromkeys([*placements_of(jaxpr), *arguments]):
            placed = PlacedValues(jaxpr, placement, *arguments.get(placement, ()))
            levels.append(placed)
            of_server, _ = server_work(placed.plan)
            by_participants |= {
                id(unstacked.eqn) for unstacked in placed.plan.producer.values()
            } - of_server
            self._count_placement(placed, names, executions)
            server += Flops(is_exact=not sends_in_while(placed))
        for eqn in jaxpr.eqns:
            if id(eqn) in by_participants:
                continue
            if any(map(is_federated, inner_jaxprs(eqn))):
                server += self._visit_control_flow(eqn, names, executions, levels)
            else:
                server += equation_flops(eqn).times(executions)
        return server

    def _visit_control_flow(
        self, eqn: JaxprEqn, names: Names, executions: int, levels: list[PlacedValues]
    ) -> Flops:
        """Count the bodies of a loop, or the costliest branch of a conditional."""
        name = eqn.primitive.name
        if name == "scan":
            executions *= eqn.params["length"]
        branches: list[tuple[Flops, _Counter]] = []
        for i, body in enumerate(bodies_of(eqn) or ()):
            counter = _Counter() if name in ("cond", "while") else self
            inside = names.inside(body.jaxpr, [eqn.invars[k] for k in body.operands])
            arguments = {}
            for level in levels:
                inner = level.uses[id(eqn)].bodies[i]
                inputs = set(body.jaxpr.invars)
                placed = {v: axis for v, axis in inner.axes.items() if v in inputs}
                arguments[level.placement] = placed, inner.fixed & inputs
            branches.append((counter.visit(body.jaxpr, inside, executions, arguments), counter))
        if name == "cond":
            server, costliest = max(branches, key=lambda branch: branch[1].total())
            self._merge(costliest)
            return server
        server = sum((flops for flops, _ in branches), start=NO_FLOPS)
        if name != "while":
            return server
        costs_nothing = not server.number and all(c.total() == (0, 0) for _, c in branches)
        for _, counter in branches:
            self._merge(counter)
        return Flops(server.number, server.is_exact and costs_nothing)

    def _merge(self, other: _Counter) -> None:
        for name, theirs in other.placements.items():
            costs = self.placements.setdefault(name, _Participant(theirs.size))
            costs.broadcast += theirs.broadcast
            costs.reduced += theirs.reduced
            costs.flops += theirs.flops

    def total(self) -> tuple[float, float]:
        """Return bytes and FLOPs of all participants, to compare branches."""
        costs = [(p.finish(""), p.size) for p in self.placements.values()]
        return (
            sum(size * (c.broadcast_bytes + c.sent_bytes) for c, size in costs),
            sum(size * c.flops for c, size in costs),
        )

    def _count_placement(self, values: PlacedValues, names: Names, executions: int) -> None:
        plan, placement = values.plan, values.placement
        of_participant = self.placements.setdefault(placement.name, _Participant(placement.size))
        of_server, _ = server_work(plan)
        work = [
            unstacked
            for key, unstacked in {
                id(unstacked.eqn): unstacked for unstacked in plan.producer.values()
            }.items()
            if key not in of_server
        ]
        received: dict[Var, None] = {}
        reads, _ = kept_values(plan)
        for unstacked in work:
            if id(unstacked.eqn) not in reads:
                operands = zip(plan.operands(unstacked.eqn), unstacked.axes.operands, strict=True)
                received |= {
                    v: None
                    for v, axis in operands
                    # Participants compute constants themselves.
                    if axis is None and isinstance(v, Var) and v not in values.known
                }
            if unstacked.eqn.primitive is federated_map_p:
                inner = unstacked.eqn.params["jaxpr"]
                if is_federated(inner.jaxpr):
                    inlined = eliminate_dead_code(inline(inner, inside=lambda j: j)).jaxpr
                    inside = names.inside(inlined, plan.operands(unstacked.eqn))
                    counter = _Counter()
                    of_participant.flops += counter.visit(inlined, inside, executions, {})
                    for nested in placements_of(inlined):
                        of_nested = counter.placements[nested.name]
                        of_participant.flops += of_nested.flops.times(nested.size)
                    self._merge(counter)
                else:
                    of_participant.flops += (
                        equation_flops(unstacked.eqn).times(1 / placement.size).times(executions)
                    )
            else:
                of_participant.flops += equation_flops(unstacked.eqn).times(
                    executions / placement.size
                )
        for v in received:
            size = num_bytes(v)
            of_participant.broadcast.append(
                Transfer(names.of(v), "broadcast", type_of(v), size, size, executions)
            )
        of_participant.reduced += sent_values(values, names, executions)
