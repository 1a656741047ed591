"""The costs of a program, as data and as a table."""

import dataclasses
from typing import NamedTuple


class Transfer(NamedTuple):
    """A value that each participant receives from the server, or sends to it.

    Attributes:
        name: the path of an argument or of a mapped function's result, or "computed from" such a
            path, after the operation; see `fedpax.transforms.value_names`.
        operation: "broadcast", "sum", "mean", "max", "min"; "gather" if the value is sent to the
            server for all participants, as for a median; "exchange" if it is sent to another
            participant.
        type: dtype and shape of the value of one participant.
        num_bytes: bytes of one participant in one execution. The terms of a reduction count in the
            dtype in which they are accumulated.
        sent_bytes: the same after compression.
        executions: number of executions in one execution of the program.
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

    Attributes:
        name: name of the placement.
        size: number of participants. For a nested placement, in each participant of the outer one.
        broadcast: the values that the participant receives.
        reduced: the values that it sends.
        flops: its floating-point operations, as `fedpax.inspect.flops.count_flops` counts them.
    """

    name: str
    size: int
    broadcast: tuple[Transfer, ...]
    reduced: tuple[Transfer, ...]
    flops: float

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
        server_flops: floating-point operations outside the participants. Each reduction counts one
            for each entry of each participant.
        peak_bytes: peak memory of a device in the compiled program: arguments, results, the values
            in between and code.
        flops_are_exact: False if a loop has a number of steps that is known only at run time, as
            with `Cohort.num_steps`; the body of such a loop counts once. A loop without FLOPs,
            broadcasts and reductions leaves the counts exact.
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
    """Format the transfers of a placement."""

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
    return [f"{placement.name}: {placement.size:,} participants", *lines]
