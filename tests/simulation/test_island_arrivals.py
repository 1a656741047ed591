"""The order of islands' arrivals: against the trace, its laws, and its errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trace import random_trace

from fedpax.simulation import Trace, buffered_arrivals, dynamic_local_steps, island_arrivals


def times_alone(trace, island, duration, last):
    """Return when an island that nobody waits for sends, and when it comes back, up to `last`."""
    sends, returns, now = [], [], 0.0
    while now <= last:
        down = trace.downtimes[island]
        inside = down[(down[:, 0] <= now) & (now < down[:, 1])]
        if len(inside):
            now = inside[0, 1]
            returns.append(now)
            continue
        end = now + duration
        hit = down[(down[:, 0] > now) & (down[:, 0] < end)]
        if len(hit):
            now = hit[0, 1]
            returns.append(now)
        else:
            now = end
            sends.append(now)
    return [s for s in sends if s <= last], [r for r in returns if r <= last]


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.booleans())
def test_islands_arrive_as_if_alone(seed, num_steps, fails):
    """Without grace, nobody waits: each island's times depend on its own trace alone."""
    trace = random_trace(seed, participants=5, horizon=400.0)
    if not fails:
        trace = Trace(trace.seconds_per_step, trace.seconds_to_receive, trace.seconds_to_send)
    order = island_arrivals(trace, num_rounds=9, num_steps=num_steps)
    duration = trace.seconds_to_receive + num_steps * trace.seconds_per_step + trace.seconds_to_send
    arrived, sent = order.position >= 0, order.num_steps > 0
    np.testing.assert_array_equal(np.isfinite(order.seconds), arrived)
    last = order.seconds[arrived].max()
    for island in range(5):
        own = order.seconds[:, island]
        sends, returns = times_alone(trace, island, duration[island], last)
        assert own[sent[:, island]].tolist() == sends
        assert own[arrived[:, island] & ~sent[:, island]].tolist() == returns
    # The order within a round and over rounds is by time; equal times share a position.
    before = -1.0
    for position, seconds in zip(order.position, order.seconds, strict=True):
        assert sorted(set(position[position >= 0])) == list(range(position.max() + 1))
        for k in range(position.max() + 1):
            (now,) = set(seconds[position == k])
            assert now >= before  # a round ends where an island comes again, even at equal times
            before = now
    # Staleness: the updates of others applied between two arrivals of an island.
    for r, island in zip(*np.nonzero(sent), strict=True):
        earlier = [order.seconds[q, island] for q in range(r) if arrived[q, island]]
        start = earlier[-1] if earlier else -1.0
        now = order.seconds[r, island]
        between = (order.seconds > start) & (order.seconds < now) & sent
        assert order.staleness[r, island] == between.sum()


def test_equal_speeds_arrive_together_in_every_round():
    order = island_arrivals(Trace(np.full(4, 0.1)), num_rounds=30, num_steps=7)
    assert np.all(order.position == 0) and np.all(order.staleness == 0)
    np.testing.assert_allclose(order.seconds[:, 0], 0.7 * np.arange(1, 31))


def test_dynamic_steps_make_islands_equally_slow():
    trace = Trace(np.array([0.5, 0.7, 1.3, 4.1]))
    steps = dynamic_local_steps(trace, 50)
    assert steps.tolist() == [50, 35, 19, 6]
    order = island_arrivals(trace, num_rounds=5, num_steps=steps, grace_seconds=1.0)
    assert np.all(order.position == 0)  # they all fit in one window
    assert order.num_steps[0].tolist() == steps.tolist()
    same = island_arrivals(trace, num_rounds=30, num_steps=50)
    assert same.staleness.max() > 10


def test_grace_waits_for_others_and_no_longer_than_needed():
    trace = Trace(np.array([1.0, 1.2, 3.0]))
    order = island_arrivals(trace, num_rounds=2, num_steps=1, grace_seconds=0.5)
    # 0 and 1 wait until 1.5; then until 2.5 + 0.5, with 2 at 3.0: all are there.
    assert order.position.tolist() == [[0, 0, -1], [0, 0, 0]]
    assert order.seconds[0, :2].tolist() == [1.5, 1.5] and order.seconds[1].tolist() == [3.0] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: island_arrivals(t, num_rounds=0, num_steps=1), "num_rounds is 0"),
        (lambda t: island_arrivals(t, num_rounds=1, num_steps=0), "smallest num_steps 0"),
        (lambda t: dynamic_local_steps(t, 0), "num_steps is 0, expected at least 1"),
        (
            lambda t: island_arrivals(
                Trace(np.ones(2), downtimes=np.full((2, 1, 2), [5.0, np.inf])),
                num_rounds=99,
                num_steps=1,
            ),
            "down for good in round 4 of 99. Ask for fewer rounds.*--trace.seconds_to_return",
        ),
    ],
)
def test_bad_arguments_raise(call, words):
    with pytest.raises(ValueError, match=words):
        call(Trace(np.ones(2)))


@pytest.mark.parametrize("num_steps", [2.5, np.array([2.0, np.nan]), 2**31])
def test_steps_that_are_not_whole_raise(num_steps):
    trace = Trace(np.array([1.0, 2.0]))
    for simulate, arguments in (
        (island_arrivals, {}),
        (buffered_arrivals, {"buffer_size": 1, "concurrency": 1}),
    ):
        with pytest.raises(ValueError, match=r"_arrivals\(\): num_steps has the value"):
            simulate(trace, num_rounds=1, num_steps=num_steps, **arguments)
