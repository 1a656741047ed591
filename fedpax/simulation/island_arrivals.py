"""The order in which islands arrive at a server that updates its model at each arrival."""

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64
from numpy.typing import ArrayLike

from fedpax.clients.arrival_schedules import ArrivalOrder, Syncs
from fedpax.errors import ArgumentError
from fedpax.primitives.casts import checked_cast
from fedpax.simulation.trace import Trace, UpTimes


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

    `H_i = max(1, floor(v_i / v_max H))`, int64 `[islands]`, for a speed of v_i steps per second.

    Raises:
        ValueError: `num_steps` is below 1.

    Example:
        >>> dynamic_local_steps(Trace(np.array([1.0, 1.5, 4.0])), 30).tolist()
        [30, 20, 7]

    Reference:
        Liu et al., arXiv:2401.09135.
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

    The server applies an island's update when it arrives, and the island continues from the new
    model. Updates that arrive within `grace_seconds` of the first are applied together. An island
    that fails loses the steps since its last arrival, and returns with the model of that time.

    A round is a stretch of arrivals in which no island arrives twice.

    Args:
        trace: speeds and failures of the islands.
        num_rounds: number of rounds.
        num_steps: H, local steps between arrivals, at least 1, for all islands or int `[islands]`.
        grace_seconds: how long an update waits for others.

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


# ---- the synchronizations of islands by a syncer that waits for a quorum: Decoupled DiLoCo


class FragmentSyncs(NamedTuple):
    """Synchronizations, one fragment after another; a round is one of each.

    Attributes:
        num_steps: int32 `[rounds, islands, fragments]`, the steps of an island that reached the
            syncer since the previous synchronization.
        weights: float32 `[rounds, islands, fragments]`, `tokens^2 / steps` since the island's part
            in the previous merge of this fragment; 0 where it has no part.
        receives: bool `[rounds, islands, fragments]`, whether the island is up.
        rejoins: bool `[rounds, islands, fragments]`, whether it came back since the previous one.
        seconds: float64 `[rounds, fragments]`, when the syncer merges.
    """

    num_steps: Int32[np.ndarray, "rounds islands fragments"]
    weights: Float32[np.ndarray, "rounds islands fragments"]
    receives: Bool[np.ndarray, "rounds islands fragments"]
    rejoins: Bool[np.ndarray, "rounds islands fragments"]
    seconds: Float64[np.ndarray, "rounds fragments"]

    @property
    def schedule(self) -> Syncs:
        """The schedules of all rounds, for `Cohort.schedule`."""
        return Syncs(self.num_steps, self.weights, self.receives, self.rejoins)


def fragment_syncs(
    trace: Trace,
    *,
    num_rounds: int,
    num_fragments: int = 1,
    steps_per_sync: int,
    quorum: int,
    grace_seconds: float = 0.0,
    max_steps_per_sync: int | None = None,
    tokens_per_step: ArrayLike = 1.0,
) -> FragmentSyncs:
    """Simulate a syncer that merges the fragments of a model, one after another.

    The syncer merges a fragment when `quorum` islands have taken `steps_per_sync` steps since the
    previous merge and have sent it. It then waits at most `grace_seconds` for the other islands,
    which continue, up to `max_steps_per_sync` steps between two merges. All islands that are up
    take part with the steps that have reached the syncer. Transfers run beside the steps.

    With `max_steps_per_sync == steps_per_sync`, a quorum of all islands and no failures this is
    `streaming_diloco`. An island that fails loses its steps since the previous merge, and returns
    with the whole outer model.

    Args:
        trace: speeds and failures of the islands.
        num_rounds: number of rounds, of `num_fragments` merges each.
        num_fragments: P. Default 1: the whole model.
        steps_per_sync: steps between two merges, H / P.
        quorum: K, number of islands that the syncer waits for, 1 to the number of islands.
        grace_seconds: how long it waits for more of them.
        max_steps_per_sync: the most steps of an island between two merges. Default None:
            `steps_per_sync`.
        tokens_per_step: tokens of a step, of all islands or `[islands]`.

    Raises:
        ValueError: a number is out of range, or fewer than `quorum` islands remain for good.

    Example:
        >>> trace = Trace(np.array([1.0, 1.0, 2.0]))
        >>> syncs = fragment_syncs(
        ...     trace, num_rounds=2, steps_per_sync=4, quorum=2, max_steps_per_sync=6
        ... )
        >>> syncs.seconds[:, 0].tolist(), syncs.num_steps[0, :, 0].tolist()
        ([4.0, 8.0], [4, 4, 2])

    Reference:
        Douillard et al., arXiv:2604.21428.
    """
    islands = trace.num_participants
    most = steps_per_sync if max_steps_per_sync is None else max_steps_per_sync
    for name, value, least, largest in (
        ("num_rounds", num_rounds, 1, np.inf),
        ("num_fragments", num_fragments, 1, np.inf),
        ("steps_per_sync", steps_per_sync, 1, np.inf),
        ("quorum", quorum, 1, islands),
        ("grace_seconds", grace_seconds, 0, np.inf),
        ("max_steps_per_sync", most, steps_per_sync, np.inf),
    ):
        if not least <= value <= largest:
            wanted = f"{least} to {largest}" if largest < np.inf else f"at least {least}"
            raise ArgumentError(f"fragment_syncs(): {name} is {value}, expected {wanted}.")
    tokens = np.broadcast_to(
        checked_cast(tokens_per_step, np.float64, "tokens_per_step"), (islands,)
    )
    workers = [_Island(trace, island, steps_per_sync, most) for island in range(islands)]
    shape = num_rounds, islands, num_fragments
    num_steps, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    receives, rejoins = np.zeros(shape, bool), np.zeros(shape, bool)
    seconds = np.zeros((num_rounds, num_fragments))
    unmerged = np.zeros((islands, num_fragments), np.int64)  # steps since the last part in a merge
    for r in range(num_rounds):
        for p in range(num_fragments):
            ready = sorted(worker.ready() for worker in workers)
            if ready[quorum - 1] == np.inf:
                raise ArgumentError(
                    f"fragment_syncs(): in round {r} of {num_rounds} fewer than quorum={quorum} "
                    "islands are left for good. Lower quorum, or draw a trace with time_to_return=."
                )
            last = max(time for time in ready if time < np.inf)
            now = max(ready[quorum - 1], min(ready[quorum - 1] + grace_seconds, last))
            seconds[r, p] = now
            for i, worker in enumerate(workers):
                rejoins[r, i, p], receives[r, i, p], taken = worker.advance(now)
                if rejoins[r, i, p] or not receives[r, i, p]:
                    unmerged[i] = 0
                unmerged[i] += taken
                num_steps[r, i, p] = taken
                if receives[r, i, p]:
                    weights[r, i, p] = unmerged[i, p] * tokens[i] ** 2
                    unmerged[i, p] = 0
    return FragmentSyncs(num_steps, weights, receives, rejoins, seconds)


class _Island:
    """An island between two merges: when its next step ends, and whether it has come back."""

    def __init__(self, trace: Trace, island: int, steps: int, most: int) -> None:
        self._up_times, self._island = UpTimes(trace), island
        self._steps, self._most = steps, most
        self._step = float(trace.seconds_per_step[island])
        self._receive = float(trace.seconds_to_receive[island])
        self._send = float(trace.seconds_to_send[island])
        self._since = self._up_times.next_up(island, 0.0)  # up since then, or from then on
        self._rejoins = self._since > 0
        self._next_end = self._first_end(self._since) if self._rejoins else self._step

    def _first_end(self, returned: float) -> float:
        """Return when the first step after a return ends."""
        return returned + self._receive + self._step

    def ready(self) -> float:
        """Return when the steps of a merge have reached the syncer; infinity for never."""
        since, next_end = self._since, self._next_end
        while since < np.inf:
            end = next_end + (self._steps - 1) * self._step + self._send
            failure = self._up_times.next_failure(self._island, since)
            if end <= failure:
                return end
            since = self._up_times.next_up(self._island, failure)
            next_end = self._first_end(since)
        return np.inf

    def advance(self, now: float) -> tuple[bool, bool, int]:
        """Continue until a merge; return whether it came back, is up, and its steps since."""
        while self._since <= now:
            failure = self._up_times.next_failure(self._island, self._since)
            if failure > now:
                break
            self._since = self._up_times.next_up(self._island, failure)
            self._next_end, self._rejoins = self._first_end(self._since), True
        if self._since > now:
            return False, False, 0
        done = int(np.floor((now - self._send - self._next_end) / self._step + 1e-9)) + 1
        taken = min(max(done, 0), self._most)
        self._next_end += taken * self._step
        if taken == self._most:
            self._next_end = max(self._next_end, now + self._step)
        rejoins, self._rejoins = self._rejoins, False
        return rejoins, True, taken
