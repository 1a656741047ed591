"""The schedule of transfers between TPU slices: the work between their starts and completions."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TypeAlias

from fedpax.hlo import trip_counts
from fedpax.hlo.costs import matmul_flops
from fedpax.hlo.parsing import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class Work:
    """Matmuls that a device runs."""

    flops: float  # convolutions included


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a transfer: its last send or receive."""

    send: str  # name of its `send` instruction


@dataclasses.dataclass(frozen=True)
class Completion:
    """The completion of a transfer: the program waits for it."""

    send: str  # name of its `send` instruction


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop with transfers inside."""

    times: int  # its trip count; 1 if it is known only at run time
    events: tuple[Event, ...]

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls in all executions of the body."""
        return self.times * total_flops(self.events)


Event: TypeAlias = Work | Start | Completion | Loop


def schedule(module: Module) -> tuple[Event, ...]:
    """List the transfers between slices and the matmuls of a program, in their scheduled order."""
    # A device executes a text in its order. A transfer is in flight from its last `send` or `recv`
    # to its first `send-done` or `recv-done`, or to the end of the computation that starts it.
    # Matmuls between two events are one `Work`, loops without transfers included. Calls are
    # inlined. Of a conditional, the branch with transfers and the most FLOPs is listed.
    trips = trip_counts.trip_counts(module)

    @functools.cache
    def events_of(name: str) -> tuple[Event, ...]:
        computation = module.computations[name]
        starts, completions = _ends(computation)
        events: list[Event] = []
        for instruction in computation.instructions.values():
            events.append(Work(matmul_flops(computation, instruction) or 0.0))
            events += events_of_callees(instruction)
            if instruction.name in completions:
                events.append(Completion(completions[instruction.name]))
            if instruction.name in starts:
                events.append(Start(starts[instruction.name]))
        open_transfers = set(starts.values()) - set(completions.values())
        return _merged([*events, *map(Completion, sorted(open_transfers))])

    def events_of_callees(instruction: Instruction) -> list[Event]:
        match instruction.opcode:
            case "while":
                loop = Loop(trips[instruction.name] or 1, events_of(instruction.reference("body")))
                return [loop if transfers(loop.events) else Work(loop.flops)]
            case "conditional":
                branches = [events_of(name) for name in trip_counts.callees(instruction)]
                branch = max(
                    branches, key=lambda events: (bool(transfers(events)), total_flops(events))
                )
                return list(branch)
            case "fusion" | "call" | "call-start" | "async-start":
                callees = map(events_of, trip_counts.callees(instruction))
                return [event for events in callees for event in events]
        return []

    return events_of(module.entry)


def transfers(events: Sequence[Event]) -> list[str]:
    """List the names of the `send` instructions in a schedule, loops included."""
    sends = []
    for event in events:
        if isinstance(event, Loop):
            sends += transfers(event.events)
        elif isinstance(event, Start):
            sends.append(event.send)
    return sends


def total_flops(events: Sequence[Event]) -> float:
    """Sum the FLOPs of the matmuls of a schedule."""
    return sum(event.flops for event in events if isinstance(event, Work | Loop))


def _ends(computation: Computation) -> tuple[dict[str, str], dict[str, str]]:
    """Map the instructions that start or complete a transfer to the name of its `send`."""
    # The send and the receive of a transfer have the same rendezvous.
    rendezvous: dict[str, str] = {}  # of a send or receive
    sends: dict[str, str] = {}  # `last` and `first` are by rendezvous
    last: dict[str, str] = {}
    first: dict[str, str] = {}
    for instruction in computation.instructions.values():
        if instruction.opcode in ("send", "recv"):
            if "_xla_megascale_target" not in instruction.attributes:
                continue
            key = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attributes)
            name = key.group(1) if key else instruction.name
            rendezvous[instruction.name] = name
            last[name] = instruction.name
            if instruction.opcode == "send":
                sends[name] = instruction.name
        elif instruction.opcode in ("send-done", "recv-done"):
            if (operand := instruction.operands[0]) in rendezvous:
                first.setdefault(rendezvous[operand], instruction.name)
    starts = {instruction: sends[name] for name, instruction in last.items() if name in sends}
    completions = {instruction: sends[name] for name, instruction in first.items() if name in sends}
    return starts, completions


def _merged(events: list[Event]) -> tuple[Event, ...]:
    merged: list[Event] = []
    for event in events:
        if isinstance(event, Work):
            if not event.flops:
                continue
            if merged and isinstance(last := merged[-1], Work):
                merged[-1] = Work(last.flops + event.flops)
                continue
        merged.append(event)
    return tuple(merged)
