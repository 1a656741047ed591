"""The placed values of a jaxpr, and the equations that read across participants.

An equation is *local* to a participant, *reduces* over their axis, *exchanges* entries in an order
that is known before the program runs, or *reads* all entries.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    eliminate_dead_code,
    scan_sizes,
)
from fedpax.primitives.broadcast import federated_index_p
from fedpax.primitives.jaxpr_analysis import all_eqns
from fedpax.primitives.layout import explicit_axis
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.transforms.inlining import CALLS
from fedpax.transforms.planner import make_plan
from fedpax.transforms.unstack import LoopReduction, loop_reduction, unstack

Axes = tuple[int | None, ...]


class Kind(enum.Enum):
    """The uses of the participants' axis of an equation's operands."""

    LOCAL = "local"
    REDUCTION = "reduction"
    EXCHANGE = "exchange"
    CONTROL_FLOW = "control flow"
    READ = "read"


class Use(NamedTuple):
    """An equation and its use of the participants' axis.

    `results` has the axis of each result, None for a server value. `read` are operands of which it
    reads the entries of all participants.
    """

    kind: Kind
    results: Axes
    read: tuple[Var, ...] = ()
    reduction: LoopReduction | None = None
    bodies: tuple[PlacedValues, ...] = ()


class PlacedValues:
    """The placed values of a jaxpr, with its calls inlined, for one placement.

    Attributes:
        axes: placed value -> its axis that lists the participants.
        fixed: the values that depend on no argument.
        known: those that depend on no array constant either, such as an `iota`.
        collected: server values that are computed from the entries of all participants.
        uses: id of an equation -> its use of the axis.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        placement: Placement,
        placed: Mapping[Var, int] | None = None,
        fixed: set[Var] | None = None,
    ) -> None:
        self.jaxpr, self.placement = jaxpr, placement
        self.plan = make_plan(jaxpr, placement)
        self.fixed = {*jaxpr.constvars, *(fixed or ())}
        self.known: set[Var] = set()
        self.collected: set[Var] = set()
        self.axes: dict[Var, int] = {**(placed or {}), **self.plan.axis}
        arguments = set(jaxpr.invars)
        for eqn in jaxpr.eqns:  # an argument that a federated operation reads is placed
            is_placed = eqn.params.get("placement") == placement
            if is_placed and (eqn.primitive is federated_map_p or eqn.primitive in REDUCTIONS):
                operands = _variables(self.plan.operands(eqn))
                self.axes |= {v: 0 for v in operands if v in arguments}
        self.uses: dict[int, Use] = {}
        for eqn in jaxpr.eqns:
            use = self.uses[id(eqn)] = self._use(eqn)
            is_collected = use.kind is Kind.READ or (
                use.kind is not Kind.REDUCTION
                and not self.collected.isdisjoint(_variables(self.plan.operands(eqn)))
            )
            for v, axis in zip(eqn.outvars, use.results, strict=True):
                if axis is not None:
                    self.axes[v] = axis
                    continue
                self.axes.pop(v, None)
                if is_collected:
                    self.collected.add(v)
            if eqn.primitive not in (federated_map_p, federated_index_p) and not eqn.effects:
                operands = _variables(self.plan.operands(eqn))
                if self.fixed.issuperset(operands):
                    self.fixed.update(eqn.outvars)
                if self.known.issuperset(operands):
                    self.known.update(eqn.outvars)

    def axis_of(self, v: Var | Literal) -> int | None:
        """Return the participants' axis of a value; None for a server value."""
        v = self.plan.resolve(v)
        return self.axes.get(v) if isinstance(v, Var) else None

    def _use(self, eqn: JaxprEqn) -> Use:
        operands = self.plan.operands(eqn)
        axes = tuple(map(self.axis_of, operands))
        if eqn.outvars and eqn.outvars[0] in self.plan.producer:
            needed = self.plan.producer[eqn.outvars[0]].axes.operands
            if "placement" not in eqn.params and self._on_server(operands, needed):
                return _read(eqn, operands, axes)
            results: Axes = tuple(self.plan.axis[v] for v in eqn.outvars)
            whole = zip(operands, axes, needed, strict=True)
            read = tuple(v for v, own, axis in whole if own is not None and axis is None)
            return Use(Kind.LOCAL, results, _variables(read))
        if id(eqn) in self.plan.candidates:
            return _reduction(eqn, self.plan.candidates[id(eqn)])
        bodies = bodies_of(eqn)
        if bodies is None and all(axis is None for axis in axes):
            return Use(Kind.LOCAL, (None,) * len(eqn.outvars))
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return Use(Kind.LOCAL, axes)
        if name == "sharding_constraint" and not _moves(eqn, axes[0], self.placement):
            return Use(Kind.LOCAL, axes)
        if name == "shard_map" and _communicates(eqn.params["jaxpr"], self.placement.name):
            results = tuple(_spec_axis(spec, self.placement) for spec in eqn.params["out_specs"])
            return Use(Kind.EXCHANGE, results)
        if name == "gather" and (axis := self._exchanged(eqn, axes)) is not None:
            return Use(Kind.EXCHANGE, (axis,))
        mesh_axis = explicit_axis(self.placement)
        unstacked = unstack(eqn, self.placement.size, mesh_axis, axes)
        if unstacked is not None and self._on_server(operands, unstacked.axes.operands):
            return _read(eqn, operands, axes)
        if unstacked is not None:
            return Use(Kind.LOCAL, unstacked.axes.results)
        reduction = loop_reduction(eqn, self.placement, mesh_axis, axes)
        if reduction is not None:
            return _reduction(eqn, reduction)
        if bodies is not None:
            return self._enter(eqn, bodies, axes)
        return _read(eqn, operands, axes)

    def _on_server(self, operands: Sequence[Var | Literal], needed: Axes) -> bool:
        """Return whether an equation reads slices of what the server has collected already."""
        pairs = zip(operands, needed, strict=True)
        slices = [v for v, axis in pairs if axis is not None and self.axis_of(v) is None]
        return not self.collected.isdisjoint(_variables(slices))

    def _exchanged(self, eqn: JaxprEqn, axes: Axes) -> int | None:
        """Return the participants' axis of `x[sources]`, if `sources` is known beforehand."""
        operands, numbers = self.plan.operands(eqn), eqn.params["dimension_numbers"]
        indices = operands[1]
        if axes[0] is None or (isinstance(indices, Var) and indices not in self.fixed):
            return None
        batch = [i for i in range(aval_of(eqn.outvars[0]).ndim) if i not in numbers.offset_dims]
        one_index = tuple(numbers.start_index_map) == (axes[0],) and len(batch) == 1
        is_permutation = aval_of(indices).shape[:1] == (self.placement.size,)
        removed = axes[0] in numbers.collapsed_slice_dims
        return batch[0] if one_index and is_permutation and removed else None

    def _enter(self, eqn: JaxprEqn, bodies: Sequence[Body], axes: Axes) -> Use:
        """Analyse the jaxprs of a loop or a conditional."""
        operands = self.plan.operands(eqn)
        fixed = [isinstance(v, Literal) or v in self.fixed for v in operands]
        shift = [0] * len(operands)
        carried = range(0)
        name = eqn.primitive.name
        if name == "scan":
            first, num_carried = scan_sizes(eqn)
            carried = range(first, first + num_carried)
            shift[carried.stop :] = [1] * (len(operands) - carried.stop)
        elif name == "while":
            first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            carried = range(first, len(operands))
        entering = [None if a is None or a < s else a - s for a, s in zip(axes, shift, strict=True)]
        for i in carried:
            fixed[i] = False
        while True:
            levels = [body.analyse(self.placement, entering, fixed) for body in bodies]
            outs = [[level.axis_of(v) for v in level.jaxpr.outvars] for level in levels]
            after = outs[-1][: len(carried)]
            # A carry that a step makes placed is placed; one that a step replaces is not.
            changed = {
                i: axis
                for i, axis in zip(carried, after, strict=True)
                if axis is not None and entering[i] is None
            }
            if not changed:
                break
            for i, axis in changed.items():
                entering[i] = axis
        if name == "cond":
            results = tuple(
                next((axis for axis in axes_of_result if axis is not None), None)
                for axes_of_result in zip(*outs, strict=True)
            )
        else:
            step = int(name == "scan")
            rest = [None if axis is None else axis + step for axis in outs[-1][len(carried) :]]
            results = (*after, *rest)
        read = [v for v, a, s in zip(operands, axes, shift, strict=True) if a is not None and a < s]
        return Use(Kind.CONTROL_FLOW, results, _variables(read), bodies=tuple(levels))


def _read(eqn: JaxprEqn, operands: Sequence[Var | Literal], axes: Axes) -> Use:
    placed = [v for v, axis in zip(operands, axes, strict=True) if axis is not None]
    return Use(Kind.READ, (None,) * len(eqn.outvars), _variables(placed))


def _reduction(eqn: JaxprEqn, reduction: LoopReduction) -> Use:
    return Use(Kind.REDUCTION, (None,) * len(eqn.outvars), reduction=reduction)


class Body(NamedTuple):
    """A jaxpr of a loop, a conditional or a call."""

    jaxpr: Jaxpr
    # for each of its arguments, the position among the equation's operands
    operands: tuple[int, ...]

    def analyse(
        self, placement: Placement, axes: Sequence[int | None], fixed: Sequence[bool]
    ) -> PlacedValues:
        """Find the placed values of the jaxpr, given the placed operands."""
        arguments = list(zip(self.jaxpr.invars, self.operands, strict=True))
        placed = {v: axis for v, i in arguments if (axis := axes[i]) is not None}
        return PlacedValues(self.jaxpr, placement, placed, {v for v, i in arguments if fixed[i]})


def bodies_of(eqn: JaxprEqn) -> list[Body] | None:
    """Return the jaxprs of a loop, a conditional or a call; None for another equation."""
    every, params = tuple(range(len(eqn.invars))), eqn.params
    match eqn.primitive.name:
        case "scan":
            bodies = [(params["jaxpr"], every)]
        case "while":
            condition, body = params["cond_nconsts"], params["body_nconsts"]
            carried = every[condition + body :]
            bodies = [
                (params["cond_jaxpr"], (*every[:condition], *carried)),
                (params["body_jaxpr"], every[condition:]),
            ]
        case "cond":
            bodies = [(branch, every[1:]) for branch in params["branches"]]
        case name if name in CALLS:
            inner = params[CALLS[name]]
            bodies = [(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), every)]
        case _:
            return None
    return [Body(eliminate_dead_code(closed).jaxpr, operands) for closed, operands in bodies]


def collectives_of(jaxpr: Jaxpr, axis: str) -> list[JaxprEqn]:
    """Return the collectives of a `shard_map` along a mesh axis."""
    collectives = []
    for eqn in all_eqns(jaxpr):
        named = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        names = named if isinstance(named, tuple | list) else (named,)
        if axis in names and eqn.primitive.name not in ("axis_index", "pcast", "pvary"):
            collectives.append(eqn)
    return collectives


def _communicates(jaxpr: Jaxpr, axis: str) -> bool:
    """Return whether the participants of a `shard_map` exchange values, and do nothing else."""
    primitives = {eqn.primitive.name for eqn in collectives_of(jaxpr, axis)}
    return primitives == {"ppermute"}


def _spec_axis(spec: Any, placement: Placement) -> int | None:
    """Return the dimension that a partition spec shards over the placement's mesh axis."""
    for i, entry in enumerate(spec):
        if placement.name == entry or (isinstance(entry, tuple) and placement.name in entry):
            return i
    return None


def _moves(eqn: JaxprEqn, axis: int | None, placement: Placement) -> bool:
    """Return whether a sharding constraint takes values away from their participants."""
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None or axis is None:
        return True
    free = eqn.params.get("unconstrained_dims", ())
    return axis not in free and _spec_axis(spec, placement) != axis


def _variables(values: Sequence[Var | Literal]) -> tuple[Var, ...]:
    return tuple(dict.fromkeys(v for v in values if isinstance(v, Var)))
