"""The order in which islands arrive at regional servers, and regions at a global server: HALoS."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Int32, Int64
from numpy.typing import ArrayLike

from fedpax.clients.arrival_schedules import RegionalOrder
from fedpax.errors import ArgumentError
from fedpax.primitives.casts import checked_cast, host_array
from fedpax.simulation.trace import Trace, UpTimes

Table: TypeAlias = Int32[np.ndarray, "rounds columns"]

_ARRIVES, _RETURNS, _APPLIES, _MERGES = range(4)


class RegionalArrivals(NamedTuple):
    """Events of islands and regions, in rounds in which an island arrives at most once.

    Attributes:
        position: int32 `[rounds, islands]`, as of `IslandArrivals`.
        num_steps: int32 `[rounds, islands]`, as of `IslandArrivals`.
        staleness: int32 `[rounds, islands]`, likewise, in updates that the region's server applied.
        sends: int32 `[rounds, regions]`, the position at which a region sends its update to the
            global server; -1 where it does not.
        applies: int32 `[rounds, regions]`, the position at which the global server applies it.
        merges: int32 `[rounds, regions]`, the position at which the region merges the global model.
        global_staleness: int32 `[rounds, regions]`, number of regions' updates that the global
            server applied between a region's last merged model and its update; -1 where it applies
            none of the region.
        seconds: float64 `[rounds]`, when the last event of a round happens.
        regions: the region of each island.
    """

    position: Int32[np.ndarray, "rounds islands"]
    num_steps: Int32[np.ndarray, "rounds islands"]
    staleness: Int32[np.ndarray, "rounds islands"]
    sends: Int32[np.ndarray, "rounds regions"]
    applies: Int32[np.ndarray, "rounds regions"]
    merges: Int32[np.ndarray, "rounds regions"]
    global_staleness: Int32[np.ndarray, "rounds regions"]
    seconds: Float64[np.ndarray, " rounds"]
    regions: tuple[int, ...]

    @property
    def schedule(self) -> RegionalOrder:
        """The schedules of all rounds, for `Cohort.schedule`: leaves `[rounds, islands]`."""
        region = np.array(self.regions)  # of each island
        return RegionalOrder(
            self.position, self.sends[:, region], self.applies[:, region], self.merges[:, region]
        )


def regional_arrivals(
    trace: Trace,
    *,
    regions: Sequence[int],
    num_rounds: int,
    num_steps: int | Int64[np.ndarray, " islands"],
    updates_per_exchange: int,
    seconds_to_global: ArrayLike = 0.0,
    seconds_from_global: ArrayLike = 0.0,
) -> RegionalArrivals:
    """Order the events of islands that train at their own pace, in regions with a server each.

    A region's server applies an island's update when it arrives, and the island continues from the
    new model. When a region has applied `updates_per_exchange` updates since it last merged, it
    sends its own update to the global server, and merges the global model when that has come back.

    At the same instant, arrivals come first, then sends, then the global server, then merges.
    Updates that arrive at a server together are applied together. An island that fails loses the
    steps since its last arrival. Servers and their networks do not fail.

    Args:
        trace: speeds and failures of the islands. Its transfers are those within a region.
        regions: the region of each island, numbers from 0.
        num_rounds: number of rounds.
        num_steps: H, local steps between arrivals, at least 1, for all islands or int `[islands]`.
        updates_per_exchange: K, the islands' updates between two exchanges of a region, at least 1.
        seconds_to_global: seconds of a region's update to the global server, of all regions or
            `[regions]`.
        seconds_from_global: likewise, of the global model to a region.

    Raises:
        ValueError: a number or a shape is wrong, or all islands fail for good before the last
            round.

    Example:
        >>> order = regional_arrivals(
        ...     Trace(np.array([1.0, 1.5, 2.0])),
        ...     regions=(0, 0, 1),
        ...     num_rounds=2,
        ...     num_steps=2,
        ...     updates_per_exchange=2,
        ...     seconds_to_global=0.5,
        ...     seconds_from_global=0.25,
        ... )
        >>> order.position[0].tolist()  # at 2, 3 and 4 seconds; at 4 the first one comes again
        [0, 1, -1]
        >>> order.sends[0].tolist(), order.applies[0].tolist(), order.merges[0].tolist()
        ([1, -1], [2, -1], [3, -1])

    Reference:
        Kim et al., HALoS, arXiv:2506.04531, algorithm 1.
    """
    islands = trace.num_participants
    region_of, transfers = _check(trace, regions, seconds_to_global, seconds_from_global)
    whole = checked_cast(num_steps, np.int32, "regional_arrivals(): num_steps", "Round it.")
    steps = np.broadcast_to(whole, (islands,)).tolist()
    if num_rounds < 1 or min(steps) < 1 or updates_per_exchange < 1:
        raise ArgumentError(
            f"regional_arrivals(): num_rounds is {num_rounds}, the smallest num_steps "
            f"{min(steps)} and updates_per_exchange {updates_per_exchange}, expected at least 1 "
            "of each. Raise the one below 1."
        )
    simulation = _Simulation(trace, region_of, transfers, steps, updates_per_exchange)
    seconds, now = [], 0.0
    current, position = 0, 0
    while simulation.alive:
        last, now, events = now, *simulation.next_events()
        if simulation.repeats(events, current):
            seconds.append(last)
            current, position = current + 1, 0
            if current == num_rounds:
                break
        simulation.run(events, now, current, position)
        position += 1
    if current < num_rounds:
        raise ArgumentError(
            f"regional_arrivals(): all islands are down for good in round {current} of "
            f"{num_rounds}. Ask for fewer rounds, or draw a trace with time_to_return=. In an "
            "experiment, set --training.rounds or --trace.seconds_to_return."
        )

    def table(records: Sequence[tuple[int, ...]], column: int, empty: int, width: int) -> Table:
        """Write a column of the records into an array `[rounds, width]`."""
        entries = np.full((num_rounds, width), empty, np.int32)
        if records:
            columns = np.array(records)
            entries[columns[:, 0], columns[:, 1]] = columns[:, column]
        return entries

    num_regions = len(transfers[0])
    return RegionalArrivals(
        position=table(simulation.arrivals, 2, -1, islands),
        num_steps=table(simulation.arrivals, 3, 0, islands),
        staleness=table(simulation.arrivals, 4, -1, islands),
        sends=table(simulation.sends, 2, -1, num_regions),
        applies=table(simulation.applies, 2, -1, num_regions),
        merges=table(simulation.merges, 2, -1, num_regions),
        global_staleness=table(simulation.applies, 3, -1, num_regions),
        seconds=np.array(seconds),
        regions=tuple(region_of),
    )


class _Events(NamedTuple):
    """The islands and regions that have an event at the same instant, by its kind."""

    arriving: list[int]
    returning: list[int]
    staleness: list[int]  # of the arriving islands
    sending: list[int]
    applying: list[int]
    merging: list[int]


class _Simulation:
    """Islands and regions at an instant, and the records of their events so far."""

    def __init__(
        self,
        trace: Trace,
        region_of: list[int],
        transfers: list[list[float]],
        steps: list[int],
        updates_per_exchange: int,
    ) -> None:
        islands, num_regions = trace.num_participants, len(transfers[0])
        self._region_of, (self._up, self._down) = region_of, transfers
        self._steps, self._per_exchange = steps, updates_per_exchange
        self._durations = (
            trace.seconds_to_receive
            + np.array(steps) * trace.seconds_per_step
            + trace.seconds_to_send
        ).tolist()
        self._up_times = UpTimes(trace)
        self._queue: list[tuple[float, int, int]] = []  # (time, kind, island or region)
        # Plain lists: with a few participants they are faster than arrays.
        self._began = [0] * islands  # number of updates in the model that an island has
        self._applied = [0] * num_regions  # number of islands' updates
        self._merged_at = [0] * num_regions  # this number at the last merge
        self._exchanging = [False] * num_regions
        # Regions' updates in the global model, in the model on the way to a region, and in the
        # model that the region merged last.
        self._total, self._on_the_way, self._merged = 0, [0] * num_regions, [0] * num_regions
        # The last round in which an island arrives, and in which a region has each of its events.
        self._last_arrival = [-1] * islands
        self._last_send, self._last_apply, self._last_merge = ([-1] * num_regions for _ in range(3))
        self.arrivals: list[tuple[int, ...]] = []  # (round, island, position, steps, staleness)
        self.sends: list[tuple[int, ...]] = []  # (round, region, position)
        self.applies: list[tuple[int, ...]] = []  # (round, region, position, staleness)
        self.merges: list[tuple[int, ...]] = []  # (round, region, position)
        for island in range(islands):
            self._begin(island, 0.0)
        self.alive = len(self._queue)  # islands that have an event; without one no update follows

    def _begin(self, island: int, now: float) -> None:
        """Add the next event of an island that can begin now."""
        time, arrives = self._up_times.next_event(island, now, self._durations[island])
        if time < np.inf:
            heapq.heappush(self._queue, (time, _ARRIVES if arrives else _RETURNS, island))

    def next_events(self) -> tuple[float, _Events]:
        """Return the next instant that has events, and these."""
        now = self._queue[0][0]
        due: tuple[list[int], ...] = ([], [], [], [])
        while self._queue and self._queue[0][0] == now:
            _, event_kind, index = heapq.heappop(self._queue)
            due[event_kind].append(index)
        arriving, returning, applying, merging = due
        self.alive -= len(arriving) + len(returning)
        region_of, applied = self._region_of, self._applied
        staleness = [applied[region_of[i]] - self._began[i] for i in arriving]
        for i in arriving:
            applied[region_of[i]] += 1
        sending = [
            r
            for r in dict.fromkeys(region_of[i] for i in arriving)
            if not self._exchanging[r] and applied[r] - self._merged_at[r] >= self._per_exchange
        ]
        applying += [r for r in sending if self._up[r] == 0]
        merging += [r for r in applying if self._down[r] == 0]
        return now, _Events(arriving, returning, staleness, sending, applying, merging)

    def repeats(self, events: _Events, current: int) -> bool:
        """Return whether an event would be the second one of its kind in the current round."""
        members = events.arriving + events.returning
        return (
            any(self._last_arrival[i] == current for i in members)
            or any(self._last_send[r] == current for r in events.sending)
            or any(self._last_apply[r] == current for r in events.applying)
            or any(self._last_merge[r] == current for r in events.merging)
        )

    def run(self, events: _Events, now: float, current: int, position: int) -> None:
        """Record the events of an instant, and add the events that follow from them."""
        for i, age in zip(events.arriving, events.staleness, strict=True):
            self.arrivals.append((current, i, position, self._steps[i], age))
        for i in events.returning:
            self.arrivals.append((current, i, position, 0, -1))
        for r in events.sending:
            self.sends.append((current, r, position))
            self._last_send[r], self._exchanging[r] = current, True
            if self._up[r] > 0:
                heapq.heappush(self._queue, (now + self._up[r], _APPLIES, r))
        for r in events.applying:
            self.applies.append((current, r, position, self._total - self._merged[r]))
            self._last_apply[r] = current
            self._on_the_way[r] = self._total + len(events.applying)
            if self._down[r] > 0:
                heapq.heappush(self._queue, (now + self._down[r], _MERGES, r))
        self._total += len(events.applying)
        for r in events.merging:
            self.merges.append((current, r, position))
            self._last_merge[r], self._exchanging[r] = current, False
            self._merged[r], self._merged_at[r] = self._on_the_way[r], self._applied[r]
        before = len(self._queue)
        for i in events.arriving + events.returning:
            self._last_arrival[i] = current
            self._began[i] = self._applied[self._region_of[i]]
            self._begin(i, now)
        self.alive += len(self._queue) - before


def _check(
    trace: Trace, regions: Sequence[int], *transfers: ArrayLike
) -> tuple[list[int], list[list[float]]]:
    """Check regions and transfers; return the region of each island, and seconds by region."""
    region_of = host_array(regions, "regions")
    islands = trace.num_participants
    if region_of.shape != (islands,) or set(region_of.tolist()) != set(
        range(int(region_of.max(initial=-1)) + 1)
    ):
        raise ArgumentError(
            f"regional_arrivals(): regions is {list(regions)}, expected the region of each of the "
            f"{islands} islands of the trace, numbers from 0 without gaps, such as (0, 0, 1, 1). "
            "Number the regions anew."
        )
    num_regions = int(region_of.max()) + 1
    by_region = []
    for name, given in zip(("seconds_to_global", "seconds_from_global"), transfers, strict=True):
        seconds = checked_cast(given, np.float64, name)
        finite = np.all(np.isfinite(seconds) & (seconds >= 0))
        if seconds.shape not in ((), (num_regions,)) or not finite:
            raise ArgumentError(
                f"regional_arrivals(): {name} is {given}, expected a finite number of at least 0, "
                f"or {num_regions} of them: one per region."
            )
        by_region.append(np.broadcast_to(seconds, (num_regions,)).tolist())
    return region_of.tolist(), by_region
