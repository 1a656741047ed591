"""The order in which islands arrive at regional servers, and regions at a global server: HALoS."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Int32, Int64
from numpy.typing import ArrayLike

from fedpax.clients.schedule import RegionalOrder
from fedpax.errors import ArgumentError
from fedpax.primitives.casts import checked_cast, host_array
from fedpax.simulation.trace import Trace
from fedpax.simulation.up_times import UpTimes

Table: TypeAlias = Int32[np.ndarray, "rounds columns"]

_ARRIVES, _RETURNS, _APPLIES, _MERGES = range(4)


class RegionalArrivals(NamedTuple):
    """Events of islands and regions, in rounds in which an island arrives at most once.

    A region sends, reaches the global server and merges at most once per round, too.

    Attributes:
        position: int32 `[rounds, islands]`, the position of an island's arrival in the round, from
            0; -1 where it does not arrive.
        num_steps: int32 `[rounds, islands]`, the steps that it took for this arrival; 0 where it
            does not arrive, or comes back from a failure.
        staleness: int32 `[rounds, islands]`, number of islands' updates that the region's server
            applied between an island's start and its arrival; -1 where it sends none.
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
        own = np.array(self.regions)
        return RegionalOrder(
            self.position, self.sends[:, own], self.applies[:, own], self.merges[:, own]
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

    An island receives its region's model, takes its steps, and sends its update. The region's
    server applies it at once, and the island continues from the new model. When a region has
    applied `updates_per_exchange` updates since it last merged, it sends its own update to the
    global server. That takes `seconds_to_global`; the global model comes back after
    `seconds_from_global` and is merged. Meanwhile, islands train and arrive.

    At the same instant, arrivals come first, then sends, then the global server, then merges.
    Updates that arrive at a server together are applied together, and islands that have arrived
    receive the model after a merge.

    An island that fails loses the steps since its last arrival. When it returns, it takes the
    region's model of that time. Servers and their networks do not fail.

    Args:
        trace: speeds and failures of the islands. Its transfers are those within a region.
        regions: the region of each island, numbers from 0.
        num_rounds: number of rounds.
        num_steps: H, number of local steps between arrivals, for all islands or int `[islands]`, as
            `dynamic_local_steps` gives it. At least 1.
        updates_per_exchange: K, at least 1. The paper's experiments have 32 for 4 islands per
            region.
        seconds_to_global: seconds of a region's update to the global server, of all regions or
            `[regions]`. Default 0.0.
        seconds_from_global: seconds of the global model to a region. Default 0.0.

    Returns:
        The events.

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
        >>> order.seconds.tolist()  # sent at 3, applied at 3.5, merged at 3.75
        [3.75, 4.0]

    Reference:
        Kim et al., HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for
        Geo-Distributed Large Language Model Training, arXiv:2506.04531, algorithm 1.
    """
    islands = trace.num_participants
    own, (up, down) = _check(trace, regions, seconds_to_global, seconds_from_global)
    num_regions = len(up)
    whole = checked_cast(num_steps, np.int32, "regional_arrivals(): num_steps", "Round it.")
    steps = np.broadcast_to(whole, (islands,)).tolist()
    if num_rounds < 1 or min(steps) < 1 or updates_per_exchange < 1:
        raise ArgumentError(
            f"regional_arrivals(): num_rounds is {num_rounds}, the smallest num_steps "
            f"{min(steps)} and updates_per_exchange {updates_per_exchange}, expected at least 1 "
            "of each. Raise the one below 1."
        )
    durations = (
        trace.seconds_to_receive + np.array(steps) * trace.seconds_per_step + trace.seconds_to_send
    ).tolist()
    presence = UpTimes(trace)
    events: list[tuple[float, int, int]] = []  # (time, kind, island or region)

    def begin(island: int, now: float) -> None:
        """Add the next event of an island that can begin now."""
        end = now + durations[island]
        up_at = presence.next_up(island, now)
        if up_at > now:
            event = (up_at, _RETURNS, island)
        elif (failure := presence.next_failure(island, now)) < end:
            event = (presence.next_up(island, failure), _RETURNS, island)
        else:
            event = (end, _ARRIVES, island)
        if event[0] < np.inf:
            heapq.heappush(events, event)

    # Plain lists: with a few participants they are faster than arrays.
    began = [0] * islands  # number of updates in the model that an island has
    applied = [0] * num_regions  # number of islands' updates
    merged_at = [0] * num_regions  # this number at the last merge
    exchanging = [False] * num_regions
    # Regions' updates in the global model: on the way to a region, and when the region last merged.
    on_the_way, merged, total = [0] * num_regions, [0] * num_regions, 0
    # The last round in which an island arrives, and in which a region has each of its events.
    last_arrival = [-1] * islands
    last_send, last_apply, last_merge = ([-1] * num_regions for _ in range(3))
    arrived: list[tuple[int, int, int, int, int]] = []  # (round, island, position, steps, stale)
    sent: list[tuple[int, int, int]] = []  # (round, region, position)
    reached: list[tuple[int, int, int, int]] = []  # (round, region, position, stale)
    received: list[tuple[int, int, int]] = []  # (round, region, position)
    seconds, now = [], 0.0
    current, position = 0, 0
    for island in range(islands):
        begin(island, 0.0)
    alive = len(events)  # islands that have an event; without one no update follows
    while alive:
        last, now = now, events[0][0]
        due: tuple[list[int], ...] = ([], [], [], [])
        while events and events[0][0] == now:
            _, kind, index = heapq.heappop(events)
            due[kind].append(index)
        arriving, returning, applying, merging = due
        members = arriving + returning
        alive -= len(members)
        stale = [applied[own[i]] - began[i] for i in arriving]
        for i in arriving:
            applied[own[i]] += 1
        sending = [
            r
            for r in dict.fromkeys(own[i] for i in arriving)
            if not exchanging[r] and applied[r] - merged_at[r] >= updates_per_exchange
        ]
        applying += [r for r in sending if up[r] == 0]
        merging += [r for r in applying if down[r] == 0]
        if (
            any(last_arrival[i] == current for i in members)
            or any(last_send[r] == current for r in sending)
            or any(last_apply[r] == current for r in applying)
            or any(last_merge[r] == current for r in merging)
        ):
            seconds.append(last)
            current, position = current + 1, 0
            if current == num_rounds:
                break
        for i, age in zip(arriving, stale, strict=True):
            arrived.append((current, i, position, steps[i], age))
        for i in returning:
            arrived.append((current, i, position, 0, -1))
        for i in members:
            last_arrival[i] = current
        for r in sending:
            sent.append((current, r, position))
            last_send[r], exchanging[r] = current, True
            if up[r] > 0:
                heapq.heappush(events, (now + up[r], _APPLIES, r))
        for r in applying:
            reached.append((current, r, position, total - merged[r]))
            last_apply[r], on_the_way[r] = current, total + len(applying)
            if down[r] > 0:
                heapq.heappush(events, (now + down[r], _MERGES, r))
        total += len(applying)
        for r in merging:
            received.append((current, r, position))
            last_merge[r], exchanging[r] = current, False
            merged[r], merged_at[r] = on_the_way[r], applied[r]
        before = len(events)
        for i in members:
            began[i] = applied[own[i]]
            begin(i, now)
        alive += len(events) - before
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

    return RegionalArrivals(
        position=table(arrived, 2, -1, islands),
        num_steps=table(arrived, 3, 0, islands),
        staleness=table(arrived, 4, -1, islands),
        sends=table(sent, 2, -1, num_regions),
        applies=table(reached, 2, -1, num_regions),
        merges=table(received, 2, -1, num_regions),
        global_staleness=table(reached, 3, -1, num_regions),
        seconds=np.array(seconds),
        regions=tuple(own),
    )


def _check(
    trace: Trace, regions: Sequence[int], *transfers: ArrayLike
) -> tuple[list[int], list[list[float]]]:
    """Check regions and transfers; return the region of each island, and seconds by region."""
    own = host_array(regions, "regions")
    islands = trace.num_participants
    if own.shape != (islands,) or set(own.tolist()) != set(range(int(own.max(initial=-1)) + 1)):
        raise ArgumentError(
            f"regional_arrivals(): regions is {list(regions)}, expected the region of each of the "
            f"{islands} islands of the trace, numbers from 0 without gaps, such as (0, 0, 1, 1). "
            "Number the regions anew."
        )
    num_regions = int(own.max()) + 1
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
    return own.tolist(), by_region
