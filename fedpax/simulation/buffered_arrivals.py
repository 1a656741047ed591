"""The order in which clients arrive at a server that buffers updates: FedBuff, FedAsync."""

import bisect
import heapq
import itertools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Int32
from numpy.typing import NDArray

from fedpax.clients.arrival_schedules import Arrivals
from fedpax.errors import ArgumentError
from fedpax.primitives.casts import checked_cast
from fedpax.simulation.trace import Trace, UpTimes


class BufferedArrivals(NamedTuple):
    """Arrivals at a server that updates its model once per `buffer` of them.

    Attributes:
        client_ids: int32 `[rounds, buffer]`, who arrives.
        versions: int32 `[rounds, buffer]`, the number of server updates in the model that the
            client trained from.
        staleness: int32 `[rounds, buffer]`, the round minus the version.
        seconds: float64 `[rounds, buffer]`, when the update arrives. The server updates its model
            at `seconds[:, -1]`.
        num_failed: number of clients that failed before their update arrived.
        num_discarded: number of updates above `max_staleness`.
    """

    client_ids: Int32[np.ndarray, "rounds buffer"]
    versions: Int32[np.ndarray, "rounds buffer"]
    staleness: Int32[np.ndarray, "rounds buffer"]
    seconds: Float64[np.ndarray, "rounds buffer"]
    num_failed: int
    num_discarded: int

    @property
    def max_staleness(self) -> int:
        """The largest staleness: what `fedbuff` and `fedasync` need to keep."""
        return int(self.staleness.max())

    @property
    def schedule(self) -> Arrivals:
        """The schedules of all rounds, for `Cohort.schedule`: leaves `[rounds, buffer]`."""
        return Arrivals(self.staleness)


def buffered_arrivals(
    trace: Trace,
    *,
    num_rounds: int,
    concurrency: int,
    buffer_size: int = 1,
    num_steps: int | Int[np.ndarray, " participants"] = 1,
    max_staleness: int | None = None,
    seed: int = 0,
) -> BufferedArrivals:
    """Order the arrivals of clients that train asynchronously.

    The server keeps `concurrency` clients busy, and updates its model after `buffer_size` arrivals.
    For each client that arrives or fails, another one begins: drawn uniformly from those that are
    up and not busy. A client that fails before its update has arrived loses it.

    Args:
        trace: speeds and failures of the population.
        num_rounds: number of server updates.
        concurrency: number of clients that train at the same time, at most the population.
        buffer_size: K, number of arrivals per server update. Default 1: FedAsync.
        num_steps: number of local steps, of all clients or int `[participants]`.
        max_staleness: the server discards updates above it. Default None: it uses all.
        seed: the seed of the clients drawn.

    Raises:
        ValueError: a number is out of range, or all clients fail for good before the last round.

    Example:
        >>> trace = Trace(np.array([1.0, 1.0, 2.5]))
        >>> order = buffered_arrivals(trace, num_rounds=4, concurrency=3)
        >>> order.seconds[:, 0].tolist(), order.staleness[:, 0].tolist()
        ([1.0, 1.0, 2.0, 2.0], [0, 1, 0, 1])

    Reference:
        Nguyen et al., arXiv:2106.06639, algorithm 1; Xie et al., arXiv:1903.03934, algorithm 1.
    """
    population = trace.num_participants
    _check_sizes(population, num_rounds, concurrency, buffer_size)
    durations = _durations(trace, num_steps)
    limit = num_rounds if max_staleness is None else max_staleness
    up_times = UpTimes(trace)
    generator = np.random.default_rng(seed)
    uniforms: list[float] = []
    idle = _IdleClients(trace, up_times)
    clients: list[int] = []
    versions: list[int] = []
    seconds: list[float] = []
    # (time, number of the begin, client or -1 for a free place, version or -1 for a failure)
    events: list[tuple[float, int, int, int]] = []
    push, pop = heapq.heappush, heapq.heappop
    numbers = itertools.count()
    free, now, failed, discarded = concurrency, 0.0, 0, 0
    wanted = num_rounds * buffer_size
    while len(clients) < wanted:
        version = len(clients) // buffer_size
        for _ in range(free):
            begun = next(numbers)
            if len(uniforms) < 2 * _TRIES:
                uniforms = generator.random(8192).tolist()
            client = idle.draw(now, uniforms)
            if client < 0:
                if (back := idle.next_return()) < np.inf:
                    push(events, (back, begun, -1, -1))
                continue
            end = now + durations.item(client)
            failure = up_times.next_failure(client, now) if up_times.has_failures else end
            if failure < end:
                push(events, (failure, begun, client, -1))
            else:
                push(events, (end, begun, client, version))
        if not events:
            raise ArgumentError(
                f"buffered_arrivals(): all clients are down for good after {now:g} seconds and "
                f"{version} of {num_rounds} rounds. Ask for fewer rounds, or draw a trace with "
                "time_to_return=. In an experiment, set --training.rounds or "
                "--trace.seconds_to_return."
            )
        now, free = events[0][0], 0
        while events and events[0][0] == now:
            _, _, client, start = pop(events)
            free += 1
            if client < 0:
                continue
            idle.add(client)
            if start < 0:
                failed += 1
            elif len(clients) // buffer_size - start > limit:
                discarded += 1
            elif len(clients) < wanted:
                clients.append(client)
                versions.append(start)
                seconds.append(now)
    shape = num_rounds, buffer_size
    from_version = np.array(versions, np.int32).reshape(shape)
    return BufferedArrivals(
        client_ids=np.array(clients, np.int32).reshape(shape),
        versions=from_version,
        staleness=np.arange(num_rounds, dtype=np.int32)[:, None] - from_version,
        seconds=np.array(seconds).reshape(shape),
        num_failed=failed,
        num_discarded=discarded,
    )


_TRIES = 32
"""Number of draws of an idle client before all idle clients are looked at."""


class _IdleClients:
    """The clients that do not train, in places from which they are drawn."""

    # Only where few clients are up, all are looked at, in arrays of which changed entries are
    # computed again.

    def __init__(self, trace: Trace, up_times: UpTimes) -> None:
        self._up_times, self._times = up_times, trace.downtimes.reshape(trace.num_participants, -1)
        self._size = trace.num_participants
        self._moved: dict[int, int] = {}  # place -> client, where it is not the client's number
        self._is_up = np.zeros(0, np.bool_)  # of each client at the instant of the last look
        self._until = np.zeros(0)  # and the second until which it stays so
        # The places of clients that are up at this instant, in order; None if they are not known.
        self._up: list[int] | None = None
        self._instant = 0.0

    def add(self, client: int) -> None:
        """Add a client behind all others."""
        self._moved[self._size] = client
        self._size += 1
        self._up = None

    def draw(self, now: float, uniforms: list[float]) -> int:
        """Draw and remove a client that is up; -1 if there is none."""
        if not self._up_times.has_failures:
            return self._take(int(uniforms.pop() * self._size))
        if now != self._instant:
            self._up, self._instant = None, now
        for _ in range(_TRIES):
            place = int(uniforms.pop() * self._size)
            if self._up_times.next_up(self._moved.get(place, place), now) <= now:
                return self._take(place)
        if self._up is None:
            self._look(now)
            self._up = np.flatnonzero(self._by_place(self._is_up)).tolist()
        return self._take(self._up[int(uniforms.pop() * len(self._up))]) if self._up else -1

    def next_return(self) -> float:
        """Return when the first client returns, after a draw of -1; infinity for never."""
        return float(self._by_place(self._until).min())

    def _look(self, now: float) -> None:
        if not len(self._until):
            count = len(self._times)
            self._is_up, self._until = np.zeros(count, np.bool_), np.full(count, -np.inf)
        changed = np.flatnonzero(self._until <= now)
        rows = np.pad(self._times[changed], ((0, 0), (0, 1)), constant_values=np.inf)
        before = np.count_nonzero(rows <= now, axis=1)  # failures and returns
        self._is_up[changed] = before % 2 == 0
        self._until[changed] = rows[np.arange(len(rows)), before]

    def _by_place(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return a value of each client in the order of the clients' places."""
        placed = values[: self._size].copy()
        placed[list(self._moved)] = values[list(self._moved.values())]
        return placed

    def _take(self, place: int) -> int:
        """Remove the client of a place, to which the last client moves."""
        self._size = last = self._size - 1
        client, moves = self._moved.pop(place, place), self._moved.pop(last, last)
        if place != last:
            self._moved[place] = moves
        if self._up is not None:
            if self._up[-1] == last:
                self._up.pop()  # the client that moves is up: its new place is among them
            else:
                del self._up[bisect.bisect_left(self._up, place)]
        return client


def _check_sizes(population: int, num_rounds: int, concurrency: int, buffer_size: int) -> None:
    for name, value, most in (
        ("num_rounds", num_rounds, None),
        ("buffer_size", buffer_size, None),
        ("concurrency", concurrency, population),
    ):
        if value < 1 or (most is not None and value > most):
            expected = "at least 1" if most is None else f"1 to {most}, the size of the population"
            raise ArgumentError(f"buffered_arrivals(): {name} is {value}, expected {expected}.")


def _durations(
    trace: Trace, num_steps: int | Int[np.ndarray, " participants"]
) -> Float64[np.ndarray, " participants"]:
    """Return the seconds of each client from its begin to its arrival."""
    population = trace.num_participants
    steps = checked_cast(num_steps, np.int32, "buffered_arrivals(): num_steps", "Round it.")
    if steps.shape not in ((), (population,)) or np.any(steps < 0):
        raise ArgumentError(
            f"buffered_arrivals(): num_steps has shape {list(steps.shape)}, expected one number of "
            f"at least 0, or {population} of them: one per participant."
        )
    durations = trace.seconds_to_receive + steps * trace.seconds_per_step + trace.seconds_to_send
    if not durations.min() > 0:
        raise ArgumentError(
            "buffered_arrivals(): a client takes 0 seconds, so time would stand still. Give all "
            "clients at least one step, or transfers that take time."
        )
    return np.asarray(durations)
