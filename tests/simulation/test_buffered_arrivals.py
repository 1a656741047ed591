"""The order of arrivals: against a plain simulation, its laws, and its errors."""

import heapq
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trace import random_trace

from fedpax.simulation import (
    Trace,
    buffered_arrivals,
    constant,
    draw_trace,
    exponential,
    lognormal,
)


def check_by_replaying(trace, order, *, concurrency, buffer_size, num_steps):
    """Check an order against the trace, event by event, without the code that made it."""
    duration = trace.seconds_to_receive + num_steps * trace.seconds_per_step + trace.seconds_to_send
    who, when = order.client_ids.ravel(), order.seconds.ravel()
    version = order.versions.ravel()
    updates = np.concatenate([[0.0], order.seconds[:, -1]])  # version v exists from updates[v] on
    assert np.all(np.diff(when) >= 0)
    begun = when - duration[who]
    # A client began with the newest version at that time, and was up until it had sent its update.
    margin = 1e-9 * (1 + when)
    assert np.all(updates[version] <= begun + margin)
    following = np.append(updates, np.inf)[version + 1]
    assert np.all(begun <= following + margin)
    for client, start, end in zip(who, begun + margin, when - margin, strict=True):
        down = trace.downtimes[client]
        assert not np.any((down[:, 0] < end) & (down[:, 1] > start))
    # Nobody is busy twice at once, and no more than `concurrency` clients are.
    for client in np.unique(who):
        own = who == client
        assert np.all(begun[own][1:] >= when[own][:-1] - margin[own][1:])
    middle = (begun + when) / 2
    busy = ((begun[None] < middle[:, None]) & (middle[:, None] < when[None])).sum(1)
    assert busy.max() <= concurrency
    rounds = np.arange(len(order.seconds))[:, None]
    np.testing.assert_array_equal(order.staleness, rounds - order.versions)
    assert order.staleness.min() >= 0 and order.client_ids.shape == (len(rounds), buffer_size)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
)
def test_an_order_agrees_with_its_trace(seed, concurrency, buffer_size, num_steps, fails):
    trace = random_trace(seed, participants=12, horizon=300.0)
    if not fails:
        trace = Trace(trace.seconds_per_step, trace.seconds_to_receive, trace.seconds_to_send)
    settings = {"concurrency": concurrency, "buffer_size": buffer_size, "num_steps": num_steps}
    order = buffered_arrivals(trace, num_rounds=12, seed=seed, **settings)
    check_by_replaying(trace, order, **settings)
    again = buffered_arrivals(trace, num_rounds=12, seed=seed, **settings)
    for got, want in zip(order, again, strict=True):
        np.testing.assert_array_equal(got, want)
    assert fails or order.num_failed == 0


def plain_order(trace, *, num_rounds, concurrency, buffer_size, num_steps, max_staleness, seed):
    """Simulate with a list of the idle clients, each of which is looked at."""
    duration = trace.seconds_to_receive + num_steps * trace.seconds_per_step + trace.seconds_to_send
    down = [row[row[:, 0] < np.inf] for row in trace.downtimes]

    def next_up(client, now):
        return max([now, *(end for start, end in down[client] if start <= now < end)])

    def next_failure(client, now):
        return min([np.inf, *(start for start, _ in down[client] if start > now)])

    def draw(idle):
        if not trace.downtimes.shape[1]:
            return int(uniforms.pop() * len(idle))
        for _ in range(32):
            if next_up(idle[place := int(uniforms.pop() * len(idle))], now) <= now:
                return place
        up = [place for place, client in enumerate(idle) if next_up(client, now) <= now]
        return up[int(uniforms.pop() * len(up))] if up else -1

    generator, uniforms, idle = np.random.default_rng(seed), [], list(range(len(duration)))
    arrived, events, begun, free, now, failed, discarded = [], [], 0, concurrency, 0.0, 0, 0
    while len(arrived) < num_rounds * buffer_size:
        version = len(arrived) // buffer_size
        for _ in range(free):
            begun += 1
            if len(uniforms) < 64:
                uniforms = generator.random(8192).tolist()
            if (place := draw(idle)) < 0:
                if (back := min(next_up(client, now) for client in idle)) < np.inf:
                    heapq.heappush(events, (back, begun, -1, -1))
                continue
            client, idle[place] = idle[place], idle[-1]
            idle.pop()
            end, failure = now + duration[client], next_failure(client, now)
            ends = (failure, begun, client, -1) if failure < end else (end, begun, client, version)
            heapq.heappush(events, ends)
        if not events:
            return None
        now, free = events[0][0], 0
        while events and events[0][0] == now:
            _, _, client, start = heapq.heappop(events)
            free += 1
            if client < 0:
                continue
            idle.append(client)
            if start < 0:
                failed += 1
            elif len(arrived) // buffer_size - start > max_staleness:
                discarded += 1
            elif len(arrived) < num_rounds * buffer_size:
                arrived.append((client, start, now))
    return (
        *np.array(arrived).reshape(num_rounds, buffer_size, 3).transpose(2, 0, 1),
        failed,
        discarded,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 60),
    st.floats(0.0, 0.97),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_the_order_is_that_of_a_plain_simulation(
    seed, population, down, whole_seconds, buffer_size, max_staleness
):
    """Few clients up, many at one instant, some down for good: the draws stay as they were."""
    rng = np.random.default_rng(seed)
    times = rng.exponential(1.0, (population, rng.integers(0, 9), 2)) * [20 - 19 * down, 20 * down]
    times = np.cumsum(times.reshape(population, -1), 1).reshape(times.shape)
    if times.shape[1]:
        times -= times[:, :1, :1] * (rng.random((population, 1, 1)) < down)  # down at second 0
        times[rng.random(population) < 0.2, -1, 1] = np.inf
    speeds = rng.uniform(0.5, 4.0, population)
    if whole_seconds:
        times, speeds = np.round(times), np.ceil(speeds)
    trace = Trace(speeds, downtimes=times)
    arguments = {
        "num_rounds": int(rng.integers(1, 30)),
        "concurrency": int(rng.integers(1, population + 1)),
        "buffer_size": buffer_size,
        "num_steps": 2,
        "max_staleness": max_staleness,
        "seed": seed % 1000,
    }
    expected = plain_order(trace, **arguments)
    if expected is None:
        with pytest.raises(ValueError, match="down for good"):
            buffered_arrivals(trace, **arguments)
        return
    order = buffered_arrivals(trace, **arguments)
    result = order.client_ids, order.versions, order.seconds, order.num_failed, order.num_discarded
    for got, want in zip(result, expected, strict=True):
        np.testing.assert_array_equal(got, want)


def cpu_seconds(trace, repeats=3):
    def measure():
        begin = time.process_time()
        buffered_arrivals(trace, num_rounds=20, concurrency=20, buffer_size=10)
        return time.process_time() - begin

    return min(measure() for _ in range(repeats))


@pytest.mark.parametrize("up", [0.9, 0.01])
def test_the_time_of_an_order_grows_little_with_the_population(up):
    """A hundred times the clients took a hundred times as long, and more where few are up."""
    seconds = []
    for population in (2_000, 200_000):
        failure = np.random.default_rng(0).uniform(-100.0, 0.0, (population, 1))
        failure = failure + 100 * np.arange(6)  # each client is down for a part of each 100 s
        down = np.stack([failure, failure + 100 * (1 - up)], 2).clip(0)
        seconds.append(cpu_seconds(Trace(np.full(population, 0.1), downtimes=down)))
    assert seconds[1] < 20 * seconds[0], seconds


def test_equal_speeds_draw_cohorts_without_replacement():
    trace = draw_trace(30, seed=0, seconds_per_step=constant(0.3), seconds_to_send=constant(0.1))
    order = buffered_arrivals(trace, num_rounds=50, concurrency=6, buffer_size=6, num_steps=7)
    assert order.max_staleness == 0
    np.testing.assert_allclose(order.seconds, 2.2 * np.arange(1, 51)[:, None].repeat(6, 1))
    assert all(len(set(cohort)) == 6 for cohort in order.client_ids.tolist())
    counts = np.bincount(order.client_ids.ravel(), minlength=30)
    assert counts.min() > 0 and counts.max() < 30  # 10 on average


def test_staleness_grows_with_concurrency_over_buffer():
    trace = draw_trace(2000, seed=0, seconds_per_step=lognormal(1.0, 0.5))
    order = buffered_arrivals(trace, num_rounds=400, concurrency=200, buffer_size=10)
    assert order.staleness[100:].mean() == pytest.approx(200 / 10, rel=0.1)


def test_an_update_above_max_staleness_is_discarded():
    trace = Trace(np.array([1.0] * 5 + [7.5]))
    order = buffered_arrivals(trace, num_rounds=60, concurrency=6, max_staleness=20)
    assert 5 not in order.client_ids and order.max_staleness <= 20
    assert order.num_discarded == 1  # after 7.5 of 12 seconds
    kept = buffered_arrivals(trace, num_rounds=60, concurrency=6)
    assert 5 in kept.client_ids and kept.num_discarded == 0


def test_when_nobody_is_up_the_places_stay_free_until_a_return():
    down = np.array([[[2.5, 100.0]], [[2.5, 200.0]]])
    order = buffered_arrivals(
        Trace(np.ones(2), downtimes=down), num_rounds=8, concurrency=2, seed=1
    )
    assert order.seconds.ravel().tolist() == [1.0, 1.0, 2.0, 2.0, 101.0, 102.0, 103.0, 104.0]
    assert order.client_ids.ravel()[4:].tolist() == [0] * 4 and order.num_failed == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"concurrency": 5}, "concurrency is 5, expected 1 to 4, the size of the population"),
        ({"buffer_size": 0}, "buffer_size is 0, expected at least 1"),
        ({"num_rounds": 0}, "num_rounds is 0"),
        ({"num_steps": np.ones(3, int)}, "num_steps has shape .3.*one per participant"),
        ({"num_steps": 0}, "time would stand still. Give all clients at least one step"),
    ],
)
def test_bad_arguments_raise(arguments, words):
    trace = Trace(np.ones(4))
    with pytest.raises(ValueError, match=words):
        buffered_arrivals(trace, **{"num_rounds": 3, "concurrency": 2, **arguments})


def test_a_population_that_dies_out_raises():
    trace = draw_trace(
        9, seed=0, seconds_per_step=constant(1), time_to_failure=exponential(9), horizon=1e3
    )
    remedy = r"down for good .* draw a trace with time_to_return.*--trace\.seconds_to_return"
    with pytest.raises(ValueError, match=remedy):
        buffered_arrivals(trace, num_rounds=1000, concurrency=3)
