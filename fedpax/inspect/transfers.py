"""The values that a participant sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import jax

from fedpax.inspect.sent_marks import Sent, kept_values, sent_by_results, server_work
from fedpax.primitives._jax import JaxprEqn, Var, aval_of
from fedpax.primitives.jaxpr_analysis import inner_jaxprs, num_bytes
from fedpax.primitives.map import federated_map_p
from fedpax.transforms.inlining import is_federated
from fedpax.transforms.part_of_jaxpr import EqualValues
from fedpax.transforms.placed_values import Kind, PlacedValues, bodies_of, collectives_of
from fedpax.transforms.unstack import LoopReduction
from fedpax.transforms.value_names import Names, operation_of, type_of


class Transfer(NamedTuple):
    """A value that each participant receives from the server, or sends to it.

    `name` is the path of an argument or of a mapped function's result, or "computed from" such a
    path, and `type` is one participant's. `operation` is "broadcast", "sum", "mean", "max", "min",
    "gather" (the server reads all participants' values), or "exchange". `num_bytes`, of one
    participant and one execution, count terms in the dtype in which they are accumulated,
    `sent_bytes` after compression.
    """

    name: str
    operation: str
    type: str
    num_bytes: int
    sent_bytes: int
    executions: int


@dataclasses.dataclass(frozen=True)
class PlacementCost:
    """The costs of one participant of a placement.

    Of a nested placement, `size` is for each participant of the outer one. `where` has the mesh
    axis that shards the participants, in words; "" without a mesh.
    """

    name: str
    size: int
    broadcast: tuple[Transfer, ...]
    reduced: tuple[Transfer, ...]
    flops: float
    where: str = ""

    @property
    def broadcast_bytes(self) -> int:
        """The bytes that a participant receives."""
        return sum(t.sent_bytes * t.executions for t in self.broadcast)

    @property
    def reduced_bytes(self) -> int:
        """The bytes that a participant sends, before compression."""
        return sum(t.num_bytes * t.executions for t in self.reduced)

    @property
    def sent_bytes(self) -> int:
        """The bytes that a participant sends, after compression."""
        return sum(t.sent_bytes * t.executions for t in self.reduced)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The costs of one execution of a program. `str` formats them as a table.

    Attributes:
        placements: the costs of a participant, by the name of its placement.
        server_flops: floating-point operations outside the participants.
        peak_bytes: peak memory of a device in the compiled program: arguments, results, the values
            in between and code.
        flops_are_exact: False if a loop's number of steps is known only at run time; its body
            counts once.
    """

    placements: dict[str, PlacementCost]
    server_flops: float
    peak_bytes: int
    flops_are_exact: bool

    def __str__(self) -> str:
        lines: list[str] = []
        for placement in self.placements.values():
            lines += _table(placement)
        unknown = "" if self.flops_are_exact else "; loops of unknown length count once"
        for placement in self.placements.values():
            lines.append(
                f"FLOPs of a participant of {placement.name}: {placement.flops:,.0f}{unknown}"
            )
        lines.append(f"FLOPs of the server: {self.server_flops:,.0f}")
        lines.append(f"peak memory of a device: {self.peak_bytes:,} bytes")
        return "\n".join(lines)


def _table(placement: PlacementCost) -> list[str]:
    def bytes_of(transfer: Transfer, size: int) -> str:
        times = f"{transfer.executions} x " if transfer.executions > 1 else ""
        return f"{times}{size:,}"

    rows = [("  each receives", "type", "bytes", "")]
    rows += [(f"    {t.name}", t.type, bytes_of(t, t.num_bytes), "") for t in placement.broadcast]
    if len(placement.broadcast) > 1:
        rows.append(("    total", "", f"{placement.broadcast_bytes:,}", ""))
    rows.append(("  each sends", "type", "bytes", "sent"))
    rows += [
        (f"    {t.name}", t.type, bytes_of(t, t.num_bytes), bytes_of(t, t.sent_bytes))
        for t in placement.reduced
    ]
    if len(placement.reduced) > 1:
        total = f"{placement.reduced_bytes:,}", f"{placement.sent_bytes:,}"
        rows.append(("    total", "", *total))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip()
        for a, b, c, d in rows
    ]
    where = f", {placement.where}" if placement.where else ""
    return [f"{placement.name}: {placement.size:,} participants{where}", *lines]


def sent_values(placed: PlacedValues, names: Names, executions: int) -> list[Transfer]:
    """List the values that a participant sends, the compressed ones last; outside of loops."""
    return list(_Sends(placed, names, executions).transfers())


def sends_in_while(placed: PlacedValues, is_inside: bool = False) -> bool:
    """Return whether participants send values in a loop of unknown length."""
    for eqn in placed.jaxpr.eqns:
        use = placed.uses[id(eqn)]
        if is_inside and (use.read or use.kind in (Kind.REDUCTION, Kind.EXCHANGE)):
            return True
        unknown = is_inside or eqn.primitive.name == "while"
        if any(sends_in_while(body, unknown) for body in use.bodies):
            return True
    return False


class _Sends:
    """The values that a participant sends in one jaxpr."""

    def __init__(self, placed: PlacedValues, names: Names, executions: int) -> None:
        self.placed, self.names, self.executions = placed, names, executions
        self.plan = placed.plan
        self.equal = EqualValues(placed.jaxpr)
        self.codes = sent_by_results(placed)
        self.compressed: dict[Sent, tuple[str, str]] = {}
        self.sent: set[Hashable] = set()  # equal values are sent once

    def transfers(self) -> Iterator[Transfer]:
        skipped = self._skipped()
        for eqn in self.placed.jaxpr.eqns:
            if id(eqn) in skipped:
                continue
            use = self.placed.uses[id(eqn)]
            for v in use.read:
                yield from self._gather(v)
            if use.kind is Kind.REDUCTION and use.reduction is not None:
                yield from self._reduce(eqn, use.reduction)
            elif use.kind is Kind.EXCHANGE:
                yield from self._exchange(eqn)
            elif use.kind is Kind.CONTROL_FLOW and not any(map(is_federated, inner_jaxprs(eqn))):
                yield from self._enter(eqn, use.bodies)
        for code, (operation, name) in self.compressed.items():
            times = code.executions * self.executions
            yield Transfer(
                f"{operation} of {name}", operation, code.type, code.before, code.num_bytes, times
            )

    def _skipped(self) -> set[int]:
        """Return the identities of equations that send nothing: the server's and the store's."""
        skipped, of_server = server_work(self.plan)
        reads, kept = kept_values(self.plan)
        needed = {v for v in self.placed.jaxpr.outvars if isinstance(v, Var)}
        for eqn in reversed(self.placed.jaxpr.eqns):
            operands = {v for v in self.plan.operands(eqn) if isinstance(v, Var)}
            if (
                id(eqn) in reads
                or not operands.isdisjoint(of_server | kept)
                or (needed.isdisjoint(eqn.outvars) and eqn.primitive is not federated_map_p)
            ):
                skipped.add(id(eqn))  # such as the indices of clients, which only a store reads
            else:
                needed |= operands
        return skipped

    def _transfer(
        self, operation: str, v: Var, kind: str, size: int, key: Hashable
    ) -> Iterator[Transfer]:
        """Yield a value that is sent as it is, unless an equal one is sent already."""
        name = self.names.of_placed(v)
        codes = self.codes.get(v, ())
        if codes:
            self.compressed |= {c: (operation, name) for c in codes if c not in self.compressed}
        elif key not in self.sent:
            self.sent.add(key)
            # A sum of booleans is the number of participants with True.
            noun = "count" if operation == "sum" and kind == "bool[]" else operation
            yield Transfer(f"{noun} of {name}", operation, kind, size, size, self.executions)

    def _gather(self, v: Var) -> Iterator[Transfer]:
        if v in self.placed.fixed:
            return
        size, axis = num_bytes(v) // self.placed.placement.size, self.placed.axes[v]
        yield from self._transfer(
            "gather", v, type_of(v, axis), size, ("gather", self.equal.number(v))
        )

    def _reduce(self, eqn: JaxprEqn, reduction: LoopReduction) -> Iterator[Transfer]:
        operands = [self.plan.resolve(v) for v in reduction.eqn.invars]
        first, *weights = operands
        if all(not isinstance(v, Var) or v in self.placed.known for v in operands):
            return  # the result is a constant
        operation, (term, *others) = operation_of(eqn), _terms(reduction)
        numbers = [self.equal.number(v) for v in operands]
        monoid = "sum" if operation == "mean" else operation
        if isinstance(first, Var):
            value_type = type_of(first, reduction.axes[0])
            key = monoid, term.dtype, *numbers
            yield from self._transfer(operation, first, value_type, _num_bytes(term), key)
        for total in others:  # the sum of the weights
            if isinstance(weights[0], Var) and weights[0] not in self.placed.known:
                value_type = type_of(weights[0], reduction.axes[1])
                key = "sum", total.dtype, numbers[1]
                yield from self._transfer("sum", weights[0], value_type, _num_bytes(total), key)

    def _exchange(self, eqn: JaxprEqn) -> Iterator[Transfer]:
        if eqn.primitive.name != "shard_map":
            v = self.plan.resolve(eqn.invars[0])
            assert isinstance(v, Var)  # placed
            size = num_bytes(v) // self.placed.placement.size
            key = "exchange", self.equal.number(v), self.equal.number(eqn.invars[1])
            yield from self._transfer("exchange", v, type_of(v, self.placed.axes[v]), size, key)
            return
        inner, axis = eqn.params["jaxpr"], self.placed.placement.name
        names = self.names.inside(inner, eqn.invars)
        outer = dict(zip(inner.invars, eqn.invars, strict=True))
        for collective in collectives_of(inner, axis):
            for v in collective.invars:
                if isinstance(v, Var):
                    share = eqn.params["mesh"].shape[axis] / self.placed.placement.size
                    size = int(num_bytes(v) * share)
                    name, value_type = names.of_placed(v), type_of(outer.get(v, v), 0)
                    yield Transfer(
                        f"exchange of {name}", "exchange", value_type, size, size, self.executions
                    )

    def _enter(self, eqn: JaxprEqn, bodies: tuple[PlacedValues, ...]) -> Iterator[Transfer]:
        """Yield the values that array code in a loop or in the costliest branch sends."""
        name = eqn.primitive.name
        times = self.executions * (eqn.params["length"] if name == "scan" else 1)
        branches = []
        for body, level in zip(bodies_of(eqn) or (), bodies, strict=True):
            names = self.names.inside(level.jaxpr, [eqn.invars[i] for i in body.operands])
            branches.append(sent_values(level, names, times))
        if name == "cond":
            branches = [
                max(branches, key=lambda sent: sum(t.sent_bytes * t.executions for t in sent))
            ]
        for transfers in branches:
            yield from transfers


def _terms(reduction: LoopReduction) -> list[jax.ShapeDtypeStruct]:
    """Return the types of the terms of a reduction that one participant sends."""
    ones = []
    for v, axis in zip(reduction.eqn.invars, reduction.axes, strict=True):
        aval = aval_of(v)
        shape = tuple(1 if i == axis else size for i, size in enumerate(aval.shape))
        ones.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    return jax.eval_shape(reduction.terms, *ones)


def _num_bytes(term: jax.ShapeDtypeStruct) -> int:
    return term.size * term.dtype.itemsize
