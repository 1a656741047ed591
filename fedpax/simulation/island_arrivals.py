"""The order in which islands arrive at a server that updates its model at each arrival."""

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from fedpax.clients.schedule import ArrivalOrder
from fedpax.errors import ArgumentError
from fedpax.primitives.casts import checked_cast
from fedpax.simulation.trace import Trace
from fedpax.simulation.up_times import UpTimes


class IslandArrivals(NamedTuple):
    """Arrivals of islands, in rounds in which an island arrives at most once.

    Attributes:
        position: int32 `[rounds, islands]`, the position of an island's arrival in the round, from
            0; -1 where it does not arrive.
        num_steps: int32 `[rounds, islands]`, the steps that it took for this arrival; 0 where it
            does not arrive, or comes back from a failure.
        staleness: int32 `[rounds, islands]`, number of updates that the server applied between an
            island's start and its arrival; -1 where it sends none.
        seconds: float64 `[rounds, islands]`, when it arrives; infinity where it does not.
    """

    position: Int32[np.ndarray, "rounds islands"]
    num_steps: Int32[np.ndarray, "rounds islands"]
    staleness: Int32[np.ndarray, "rounds islands"]
    seconds: Float64[np.ndarray, "rounds islands"]

    @property
    def schedule(self) -> ArrivalOrder:
        """The schedules of all rounds, for `Cohort.schedule`: leaves `[rounds, islands]`."""
        return ArrivalOrder(self.position)


def dynamic_local_steps(trace: Trace, num_steps: int) -> Int64[np.ndarray, " islands"]:
    """Give each island a number of local steps in proportion to its speed (DyLU).

    `H_i = max(1, floor(v_i / v_max H))` for a speed of v_i steps per second. Islands then need
    nearly the same time, and the fastest takes H steps.

    Args:
        trace: the islands' speeds.
        num_steps: H, at least 1.

    Returns:
        int64 `[islands]`.

    Raises:
        ValueError: `num_steps` is below 1.

    Example:
        >>> dynamic_local_steps(Trace(np.array([1.0, 1.5, 4.0])), 30).tolist()
        [30, 20, 7]

    Reference:
        Liu et al., Asynchronous Local-SGD Training for Language Modeling, arXiv:2401.09135.
    """
    if num_steps < 1:
        raise ArgumentError(
            f"dynamic_local_steps(): num_steps is {num_steps}, expected at least 1."
        )
    speed = trace.seconds_per_step.min() / trace.seconds_per_step
    # 1e-9: a ratio that is whole but for its rounding is not rounded down.
    return np.maximum(1, np.floor(speed * num_steps + 1e-9)).astype(np.int64)


def island_arrivals(
    trace: Trace,
    *,
    num_rounds: int,
    num_steps: int | Int64[np.ndarray, " islands"],
    grace_seconds: float = 0.0,
) -> IslandArrivals:
    """Order the arrivals of islands that train at their own pace.

    An island receives the model, takes its steps, and sends its update. The server applies it at
    once, and the island continues from the new model. Updates that arrive at the same time
    are applied together. With `grace_seconds` the server waits that long after an arrival for
    others, but no longer than until all islands have arrived.

    An island that fails loses the steps since its last arrival. When it returns, it takes the
    model of that time.

    A round is a stretch of arrivals in which no island arrives twice. All arrivals of a round
    train at the same time on the islands' devices, and are applied in their order.

    Args:
        trace: speeds and failures of the islands.
        num_rounds: number of rounds.
        num_steps: H, number of local steps between arrivals, for all islands or int `[islands]`, as
            `dynamic_local_steps` gives it. At least 1.
        grace_seconds: how long an update waits for others. Default 0.0.

    Returns:
        The arrivals.

    Raises:
        ValueError: a number is out of range, or all islands fail for good before the last round.

    Example:
        >>> order = island_arrivals(Trace(np.array([1.0, 1.0, 2.0])), num_rounds=2, num_steps=5)
        >>> order.position.tolist()  # at 5 s: 0 and 1; at 10 s: all
        [[0, 0, -1], [0, 0, 0]]
        >>> order.staleness[1].tolist(), order.seconds[1].tolist()
        ([0, 0, 2], [10.0, 10.0, 10.0])
    """
    islands = trace.num_participants
    whole = checked_cast(num_steps, np.int32, "island_arrivals(): num_steps", "Round it.")
    steps = np.broadcast_to(whole, (islands,)).tolist()
    if num_rounds < 1 or min(steps) < 1 or not 0 <= grace_seconds < np.inf:
        raise ArgumentError(
            f"island_arrivals(): num_rounds is {num_rounds}, the smallest num_steps {min(steps)} "
            f"and grace_seconds {grace_seconds}, expected at least 1, at least 1 and at least 0."
        )
    durations = (
        trace.seconds_to_receive + np.array(steps) * trace.seconds_per_step + trace.seconds_to_send
    ).tolist()
    up_times = UpTimes(trace)
    events: list[tuple[float, int, bool]] = []  # (time, island, whether it sends an update)

    def begin(island: int, now: float) -> None:
        """Add the next event of an island that can begin now."""
        time, sends = up_times.next_event(island, now, durations[island])
        if time < np.inf:
            heapq.heappush(events, (time, island, sends))

    # Plain lists: with a few islands they are faster than arrays. A row is a round.
    position, taken, staleness, seconds = ([[empty] * islands] for empty in (-1, 0, -1, np.inf))
    started = [0] * islands  # number of updates in the model that an island has
    applied, next_position = 0, 0
    for island in range(islands):
        begin(island, 0.0)
    while events:
        group = [heapq.heappop(events)]
        until = group[0][0] + grace_seconds
        while events and events[0][0] <= until:
            group.append(heapq.heappop(events))
        now = group[-1][0] if len(group) == islands else until
        if any(position[-1][island] >= 0 for _, island, _ in group):
            if len(position) == num_rounds:
                return IslandArrivals(
                    np.array(position, np.int32),
                    np.array(taken, np.int32),
                    np.array(staleness, np.int32),
                    np.array(seconds),
                )
            next_position = 0
            position.append([-1] * islands)
            taken.append([0] * islands)
            staleness.append([-1] * islands)
            seconds.append([np.inf] * islands)
        for _, island, sends in group:
            position[-1][island], seconds[-1][island] = next_position, now
            if sends:
                taken[-1][island] = steps[island]
                staleness[-1][island] = applied - started[island]
        applied += sum(sends for *_, sends in group)
        next_position += 1
        for _, island, _ in group:
            started[island] = applied
            begin(island, now)
    raise ArgumentError(
        f"island_arrivals(): all islands are down for good in round {len(position) - 1} of "
        f"{num_rounds}. Ask for fewer rounds, or draw a trace with time_to_return=. In an "
        "experiment, set --training.rounds or --trace.seconds_to_return."
    )
