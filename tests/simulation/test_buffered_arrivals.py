"""The order of arrivals: against a plain simulation, its laws, and its errors."""

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
