"""The order of events in regions: against a plain simulation, its laws, and its errors."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_island_arrivals import times_alone
from test_trace import random_trace

from fedpax.simulation import Trace, island_arrivals, regional_arrivals

REGIONS = (0, 1, 0, 1, 1)


def plain_log(trace, num_steps, every, up, down, until):
    """Simulate instant by instant: `(time, arrivals, returns, sends, applied, merged)`."""
    duration = trace.seconds_to_receive + num_steps * trace.seconds_per_step + trace.seconds_to_send
    alone = [times_alone(trace, i, duration[i], until) for i in range(len(REGIONS))]
    server_events = {}  # (kind, region): time
    since_merge, log = [0, 0], []
    while True:
        times = [t for sends, returns in alone for t in (*sends, *returns)]
        times = [t for t in (*times, *server_events.values()) if not log or t > log[-1][0]]
        now = min((t for t in times if t <= until), default=None)
        if now is None:
            return log
        arrivals = {i for i, (sends, _) in enumerate(alone) if now in sends}
        returns = {i for i, (_, returns) in enumerate(alone) if now in returns}
        for i in arrivals:
            since_merge[REGIONS[i]] += 1
        sends = set()
        for r in {REGIONS[i] for i in arrivals}:
            waits = ("apply", r) in server_events or ("merge", r) in server_events
            if not waits and since_merge[r] >= every:
                sends.add(r)
                server_events["apply", r] = now + up[r]
        applied = {r for (kind, r), t in server_events.items() if (kind, t) == ("apply", now)}
        for r in applied:
            del server_events["apply", r]
            server_events["merge", r] = now + down[r]
        merged = {r for (kind, r), t in server_events.items() if (kind, t) == ("merge", now)}
        for r in merged:
            del server_events["merge", r]
            since_merge[r] = 0
        log.append((now, arrivals, returns, sends, applied, merged))


def log_of(order):
    """List what happens at each position of each round, in the form of `plain_log`."""
    log = []
    for r in range(len(order.position)):
        tables = order.position[r], order.sends[r], order.applies[r], order.merges[r]
        instants = []
        for k in range(max(table.max() for table in tables) + 1):
            here, *servers = ({*np.flatnonzero(table == k).tolist()} for table in tables)
            steps = order.num_steps[r]
            arrivals = {i for i in here if steps[i]}
            instants.append((arrivals, here - arrivals, *servers))
            assert any(instants[-1])  # no position is left out
        log.append(instants)
    return log


@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.sampled_from([(0.0, 0.0), (3.0, 0.5), (40.0, 25.0)]),
    st.sampled_from([0.0, 7.0]),
)
def test_events_equal_those_of_a_plain_simulation(seed, every, up, down):
    trace = random_trace(seed, participants=5, horizon=400.0)
    order = regional_arrivals(
        trace,
        regions=REGIONS,
        num_rounds=12,
        num_steps=2,
        updates_per_exchange=every,
        seconds_to_global=up,
        seconds_from_global=down,
    )
    log = plain_log(trace, 2, every, up, (down, down), order.seconds[-1])
    rounds = log_of(order)
    assert [event for instants in rounds for event in instants] == [event[1:] for event in log]
    ends = np.cumsum([len(instants) for instants in rounds]) - 1
    assert order.seconds.tolist() == [log[end][0] for end in ends]
    # A round ends only where an island or a region would come again.
    for instants, following in itertools.pairwise(rounds):
        seen = [set().union(*(event[kind] for event in instants)) for kind in range(5)]
        first = following[0]
        islands = (seen[0] | seen[1]) & (first[0] | first[1])
        assert islands or any(seen[kind] & first[kind] for kind in (2, 3, 4))
    # Staleness: the updates of others that a server applied since the model was taken.
    applied, started = [0, 0], [0] * 5
    total, at_merge, on_the_way = 0, [0, 0], [0, 0]
    for r, instants in enumerate(rounds):
        for arrivals, returns, _, applies, merges in instants:
            for i in arrivals:
                assert order.staleness[r, i] == applied[REGIONS[i]] - started[i]
            for i in arrivals:
                applied[REGIONS[i]] += 1
            for i in arrivals | returns:
                started[i] = applied[REGIONS[i]]
            for region in applies:
                assert order.global_staleness[r, region] == total - at_merge[region]
            total += len(applies)
            for region in applies:
                on_the_way[region] = total
            for region in merges:
                at_merge[region] = on_the_way[region]
    sent = order.num_steps > 0
    assert np.all((order.staleness >= 0) == sent)
    assert np.all((order.global_staleness >= 0) == (order.applies >= 0))


def test_islands_of_regions_that_never_exchange_arrive_as_without_regions():
    trace = random_trace(3, participants=5, horizon=400.0)
    order = regional_arrivals(
        trace, regions=REGIONS, num_rounds=12, num_steps=3, updates_per_exchange=10**6
    )
    plain = island_arrivals(trace, num_rounds=12, num_steps=3)
    np.testing.assert_array_equal(order.position, plain.position)
    np.testing.assert_array_equal(order.num_steps, plain.num_steps)
    arrived = np.where(np.isfinite(plain.seconds), plain.seconds, -1)
    np.testing.assert_array_equal(order.seconds, arrived.max(axis=1))
    assert np.all(order.sends == -1) and np.all(order.schedule.merges == -1)


def test_equal_speeds_and_no_transfers_are_one_instant_per_round():
    order = regional_arrivals(
        Trace(np.full(5, 0.3)), regions=REGIONS, num_rounds=4, num_steps=7, updates_per_exchange=2
    )
    for array in (*order.schedule, order.staleness, order.sends):
        assert np.all(array == 0)
    # Both regions' updates are in the global model that both merge.
    assert np.all(order.global_staleness == 0)
    np.testing.assert_allclose(order.seconds, 2.1 * np.arange(1, 5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_rounds": 0}, "num_rounds is 0, .*Raise the one below 1"),
        ({"num_steps": np.array([1, 0])}, "smallest num_steps 0"),
        ({"updates_per_exchange": 0}, "updates_per_exchange 0, expected at least 1"),
        ({"regions": (0, 2)}, r"regions is \[0, 2\], .*without gaps.*Number the regions anew"),
        ({"regions": (0, 0, 1)}, "each of the 2 islands of the trace"),
        ({"seconds_to_global": -1.0}, "seconds_to_global is -1.0, expected a finite number"),
        ({"seconds_from_global": [1.0, 2.0, 3.0]}, "or 2 of them: one per region"),
        (
            {"trace": Trace(np.ones(2), downtimes=np.full((2, 1, 2), [5.0, np.inf]))},
            "down for good in round 4 of 99. Ask for fewer rounds.*--trace.seconds_to_return",
        ),
    ],
)
def test_bad_arguments_raise(change, words):
    given = {"trace": Trace(np.ones(2)), "regions": (0, 1), "num_rounds": 99, "num_steps": 1}
    given |= {"updates_per_exchange": 3, "seconds_to_global": 0.5} | change
    with pytest.raises(ValueError, match=words):
        regional_arrivals(given.pop("trace"), **given)
