"""The order in which clients arrive at a server that buffers updates: FedBuff, FedAsync."""

import heapq
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Int32

from fedpax.clients.schedule import Arrivals
from fedpax.errors import ArgumentError
from fedpax.primitives.casts import checked_cast
from fedpax.simulation.trace import TRIES, Trace, UpTimes


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
        num_discarded: number of updates above `max_staleness`, which the server does not use.
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

    The server keeps `concurrency` clients busy. A client receives the current model, takes its
    steps, and sends its update. The server adds it to a buffer, and after `buffer_size` of them it
    updates its model. For each client that arrives or fails, another client begins: drawn uniformly
    from those that are up and not busy. If there is none, the place stays free until a client
    returns. A client that fails before its update has arrived loses it.

    Clients that arrive in the same instant are added to the buffer together, before others begin.
    With equal speeds and `concurrency == buffer_size`, this is therefore a synchronous method that
    draws its cohorts without replacement.

    The order is computed event by event on the host: 200,000 to 700,000 events per second of a CPU
    core. It depends on the arguments alone.

    Args:
        trace: speeds and failures of the population.
        num_rounds: number of server updates.
        concurrency: number of clients that train at the same time, at most the population.
        buffer_size: K, number of arrivals per server update. Default 1: FedAsync.
        num_steps: number of local steps, of all clients or int `[participants]`.
        max_staleness: the server discards updates above it. Default None: it uses all.
        seed: the seed of the clients drawn.

    Returns:
        The arrivals.

    Raises:
        ValueError: a number is out of range, or all clients fail for good before the last round.

    Example:
        >>> trace = Trace(np.array([1.0, 1.0, 2.5]))
        >>> order = buffered_arrivals(trace, num_rounds=4, concurrency=3)
        >>> order.seconds[:, 0].tolist(), order.staleness[:, 0].tolist()
        ([1.0, 1.0, 2.0, 2.0], [0, 1, 0, 1])

    Reference:
        Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, arXiv:2106.06639,
        algorithm 1; Xie et al., Asynchronous Federated Optimization, arXiv:1903.03934, algorithm 1.
    """
    population = trace.num_participants
    _check_sizes(population, num_rounds, concurrency, buffer_size)
    durations = _durations(trace, num_steps)
    limit = num_rounds if max_staleness is None else max_staleness
    up_times = UpTimes(trace)
    generator = np.random.default_rng(seed)
    uniforms: list[float] = []
    idle = list(range(population))
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
            if len(uniforms) < 2 * TRIES:
                uniforms = generator.random(8192).tolist()
            place = up_times.draw(idle, now, uniforms)
            if place < 0:
                back = min(up_times.next_up(client, now) for client in idle)
                if back < np.inf:
                    push(events, (back, begun, -1, -1))
                continue
            client = idle[place]
            idle[place] = idle[-1]
            idle.pop()
            end = now + durations[client]
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
            idle.append(client)
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


def _check_sizes(population: int, num_rounds: int, concurrency: int, buffer_size: int) -> None:
    for name, value, most in (
        ("num_rounds", num_rounds, None),
        ("buffer_size", buffer_size, None),
        ("concurrency", concurrency, population),
    ):
        if value < 1 or (most is not None and value > most):
            expected = "at least 1" if most is None else f"1 to {most}, the size of the population"
            raise ArgumentError(f"buffered_arrivals(): {name} is {value}, expected {expected}.")


def _durations(trace: Trace, num_steps: int | Int[np.ndarray, " participants"]) -> list[float]:
    """Return the seconds of each client from its begin to its arrival."""
    population = trace.num_participants
    steps = checked_cast(num_steps, np.int32, "buffered_arrivals(): num_steps", "Round it.")
    if steps.shape not in ((), (population,)) or np.any(steps < 0):
        raise ArgumentError(
            f"buffered_arrivals(): num_steps has shape {list(steps.shape)}, expected one number of "
            f"at least 0, or {population} of them: one per participant."
        )
    durations: list[float] = (
        trace.seconds_to_receive + steps * trace.seconds_per_step + trace.seconds_to_send
    ).tolist()
    if not min(durations) > 0:
        raise ArgumentError(
            "buffered_arrivals(): a client takes 0 seconds, so time would stand still. Give all "
            "clients at least one step, or transfers that take time."
        )
    return durations
