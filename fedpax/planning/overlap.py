"""Transfers between slices: the local steps that hide them, and the time that stays exposed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedpax.errors import ArgumentError
from fedpax.hlo import transfer_schedule
from fedpax.hlo.transfer_schedule import Completion, Event, Loop, Start, Work

BACKWARD_FRACTION = 2 / 3
"""Part of a step's time that the backward pass takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteWorkload:
    """A model and its time per step, on one site."""

    num_params: float  # parameters that are exchanged, in layers of equal size
    num_layers: int
    step_seconds: float  # of a step that communicates nothing

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (self.num_params > 0 and self.num_layers >= 1 and self.step_seconds > 0):
            raise ArgumentError(f"{self}: expected numbers above 0.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteExchange:
    """Content, period and overlap of the exchanges between sites."""

    period: int = 1  # H, steps between two exchanges of a layer; 1 is data parallelism
    fragments: int = 1  # groups of layers, evenly spaced over the period; strided
    bits: float = 16  # of a parameter on the link; 16: two sites exchange bfloat16
    overlap_steps: int = 0  # tau, steps after an exchange begins before its result is needed

    def __post_init__(self) -> None:
        """Check the ranges."""
        if min(self.period, self.fragments) < 1 or self.bits <= 0 or self.overlap_steps < 0:
            raise ArgumentError(
                f"{self}: expected period and fragments of at least 1, bits above 0, and "
                "overlap_steps of at least 0."
            )


def exposed_seconds(
    workload: SiteWorkload, exchange: SiteExchange, bits_per_second: float
) -> float:
    """Return the seconds of one period in which a site waits for transfers."""
    if not bits_per_second > 0:
        raise ArgumentError(f"bits_per_second is {bits_per_second}, expected a number above 0.")
    num_layers = workload.num_layers
    backward = workload.step_seconds * BACKWARD_FRACTION
    transfer = exchange.bits * workload.num_params / num_layers / bits_per_second
    hidden = exchange.overlap_steps * workload.step_seconds
    exposed = 0.0
    for fragment in range(min(exchange.fragments, num_layers)):
        end = -np.inf  # from the end of the step
        for layer in reversed(range(fragment, num_layers, exchange.fragments)):
            end = max(end, -backward * layer / num_layers) + transfer
        exposed += max(0.0, end - hidden)
    return exposed


def compute_utilization(
    workload: SiteWorkload, exchange: SiteExchange, bits_per_second: float
) -> float:
    """Return the part of the time in which a site computes, from 0 to 1."""
    computing = exchange.period * workload.step_seconds
    return computing / (computing + exposed_seconds(workload, exchange, bits_per_second))


def required_bandwidth(
    workload: SiteWorkload, exchange: SiteExchange, utilization: float, grid: Sequence[float]
) -> float:
    """Return the smallest bandwidth of a grid that reaches a utilization; infinity: none does."""
    if not 0 < utilization <= 1:
        raise ArgumentError(f"utilization is {utilization}, expected above 0 and at most 1.")
    reached = (b for b in sorted(grid) if compute_utilization(workload, exchange, b) >= utilization)
    return next(reached, float("inf"))


UTILIZATIONS = (0.95, 0.99)
"""Compute utilizations for which a plan reports the smallest bandwidth."""


class SliceTransfer(NamedTuple):
    """A transfer between slices."""

    name: str
    bytes: float  # bytes that leave a slice in one execution, a lower bound
    executions: int
    start: float  # local steps of the round before its start. Inside a loop: before the loop.
    # local steps of the round before its completion. Inside a loop: before the loop's end.
    end: float
    in_loop: bool
    # local steps between start and completion of one execution, by matmul FLOPs
    local_steps: float
    exposed_seconds: float  # seconds of a round in which the program waits for it

    @property
    def bytes_per_step(self) -> float:
        """Bytes per local step if they are spread from start to completion, at least one step."""
        return self.bytes * self.executions / max(1.0, self.end - self.start)


class Overlap(NamedTuple):
    """The transfers between slices of a round, at a bandwidth."""

    bandwidth: float  # bytes per second out of a slice
    step_seconds: float  # seconds of a local step, the bound without transfers between slices
    num_steps: int
    transfers: tuple[SliceTransfer, ...]  # the transfers, in the order of their starts
    # a compute utilization, such as 0.95 -> the smallest bandwidth that reaches it, in bytes per
    # second
    required_bandwidth: Mapping[float, float]

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a round in which the program waits for transfers."""
        return sum(transfer.exposed_seconds for transfer in self.transfers)

    @property
    def compute_utilization(self) -> float:
        """Fraction of the round in which the devices compute, from 0 to 1."""
        computing = self.num_steps * self.step_seconds
        return computing / (computing + self.exposed_seconds)

    @property
    def bytes_per_round(self) -> float:
        """Bytes that leave a slice in a round."""
        return sum(transfer.bytes * transfer.executions for transfer in self.transfers)

    @property
    def mean_bytes_per_second(self) -> float:
        """Bytes per second out of a slice, averaged over the round."""
        return self.bytes_per_round / (self.num_steps * self.step_seconds + self.exposed_seconds)

    @property
    def peak_bytes_per_second(self) -> float:
        """The largest sum of the rates of transfers that are in flight at the same local step."""
        rates = (
            sum(
                transfer.bytes_per_step
                for transfer in self.transfers
                if transfer.start <= at < max(transfer.end, transfer.start + 1)
            )
            for at in {transfer.start for transfer in self.transfers}
        )
        return max(rates, default=0.0) / self.step_seconds


def find_overlap(
    events: Sequence[Event],
    slice_bytes: Mapping[str, float],
    *,
    num_steps: int,
    step_seconds: float,
    bandwidth: float,
) -> Overlap | None:
    """Find the local steps that hide each transfer, and the time that stays exposed.

    Args:
        events: the schedule of a round, from `fedpax.hlo.transfer_schedule.schedule`.
        slice_bytes: name of a transfer's `send` -> bytes that leave a slice in one execution.
        num_steps: local steps of a round.
        step_seconds: seconds of a local step.
        bandwidth: bytes per second out of a slice.

    Returns:
        The overlap; None without transfers, or without matmuls to measure local steps by.

    Raises:
        ValueError: `bandwidth` is not above 0, or not finite.

    Example:
        >>> block = [Work(15e12), Start("a"), Work(5e12), Completion("a")]  # 20 steps of 1 TFLOP
        >>> overlap = find_overlap(
        ...     block, {"a": 30e9}, num_steps=20, step_seconds=0.1, bandwidth=10e9
        ... )
        >>> round(overlap.exposed_seconds, 6)  # 3 s on the link, 0.5 s of them hidden
        2.5
    """
    if not 0 < bandwidth < math.inf:
        raise ArgumentError(
            f"bandwidth is {bandwidth}, expected a finite number of bytes per second above 0."
        )
    flops = transfer_schedule.total_flops(events)
    if not flops or not transfer_schedule.transfers(events):
        return None
    flops_per_step = flops / num_steps
    seconds_per_flop = step_seconds / flops_per_step

    def exposed(bandwidth: float) -> dict[str, float]:
        seconds = {name: count / bandwidth for name, count in slice_bytes.items()}
        return _exposed(events, seconds, lambda work: work * seconds_per_flop)

    waits = exposed(bandwidth)
    placed = [
        transfer._replace(exposed_seconds=waits[transfer.name])
        for transfer in _place(events, slice_bytes, flops_per_step)
    ]
    computing = num_steps * step_seconds

    def required(utilization: float) -> float:
        """Bisect the bandwidths, in powers of 2."""
        allowed = computing * (1 / utilization - 1)
        low, high = -20.0, 80.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            reached = sum(exposed(2**middle).values()) <= allowed
            low, high = (low, middle) if reached else (middle, high)
        return 2**high

    return Overlap(
        bandwidth=bandwidth,
        step_seconds=step_seconds,
        num_steps=num_steps,
        transfers=tuple(placed),
        required_bandwidth={share: required(share) for share in UTILIZATIONS},
    )


def _place(
    events: Sequence[Event], slice_bytes: Mapping[str, float], flops_per_step: float
) -> list[SliceTransfer]:
    """Place the transfers among the local steps of a round; nothing is exposed yet."""
    placed: dict[str, SliceTransfer] = {}
    now = 0.0

    def place(events: Sequence[Event], executions: int, loop: tuple[float, float] | None) -> None:
        nonlocal now
        starts: dict[str, float] = {}
        for event in events:
            match event:
                case Work(flops):
                    now += flops / flops_per_step
                case Start(send):
                    starts[send] = now
                case Completion(send):
                    begin, end = loop or (starts[send], now)
                    placed[send] = SliceTransfer(
                        name=send,
                        bytes=slice_bytes[send],
                        executions=executions,
                        start=begin,
                        end=end,
                        in_loop=loop is not None,
                        local_steps=now - starts[send],
                        exposed_seconds=0.0,
                    )
                case Loop(times, inner):
                    after = now + event.flops / flops_per_step
                    place(inner, executions * times, loop or (now, after))
                    now = after

    place(events, 1, None)
    return [placed[name] for name in transfer_schedule.transfers(events)]


def _exposed(
    events: Sequence[Event],
    transfer_seconds: Mapping[str, float],
    seconds: Callable[[float], float],
) -> dict[str, float]:
    """Return the seconds of a round in which the program waits for each transfer."""
    waits = dict.fromkeys(transfer_schedule.transfers(events), 0.0)
    arrival: dict[str, float] = {}
    now = link = 0.0  # the times at which the program, and the link, have done all so far

    def run(events: Sequence[Event], executions: int) -> None:
        nonlocal now, link
        for event in events:
            match event:
                case Work(flops):
                    now += seconds(flops)
                case Start(send):
                    arrival[send] = link = max(link, now) + transfer_seconds[send]
                case Completion(send):
                    wait = max(0.0, arrival[send] - now)
                    waits[send] += wait * executions
                    now += wait
                case Loop(times, inner):
                    # The first iteration can wait for earlier transfers. Each ends with an idle
                    # link, because its own transfers complete in it, so all others are equal.
                    run(inner, executions)
                    if times > 1:
                        before = now
                        run(inner, executions * (times - 1))
                        now += (now - before) * (times - 2)

    run(events, 1)
    return waits


def grouped(transfers: Sequence[SliceTransfer]) -> list[list[SliceTransfer]]:
    """Group transfers with the same start and the same local steps until completion."""

    def key(transfer: SliceTransfer) -> tuple[float, bool, float]:
        return round(transfer.start, 2), transfer.in_loop, round(transfer.local_steps, 2)

    return [list(group) for _, group in itertools.groupby(sorted(transfers, key=key), key)]
