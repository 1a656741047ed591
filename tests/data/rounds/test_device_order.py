import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.data.rounds.device_order import balanced_order, idle_fraction


@st.composite
def rounds(draw):
    devices = draw(st.integers(1, 8))
    each = draw(st.integers(0, 12))
    steps = draw(st.lists(st.integers(0, 50), min_size=devices * each, max_size=devices * each))
    return steps, devices, draw(st.integers(1, 5))


def loads(steps, devices, chunk_size):
    """Compute each device's steps in a Python loop."""
    each = len(steps) // devices
    totals = []
    for d in range(devices):
        own = list(steps[d * each : (d + 1) * each])
        total = 0
        while own:
            chunk, own = own[:chunk_size], own[chunk_size:]
            total += max(chunk) * len(chunk)
        totals.append(total)
    return totals


@given(rounds())
def test_the_order_has_every_client_once(case):
    steps, devices, chunk_size = case
    order = balanced_order(steps, devices, chunk_size=chunk_size)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(steps)))


@given(rounds())
def test_each_chunk_goes_to_the_device_with_the_least_work_and_room(case):
    steps, devices, chunk_size = case
    each = len(steps) // devices
    ranked = sorted(range(len(steps)), key=lambda k: -steps[k])
    assigned, load = [[] for _ in range(devices)], [0] * devices
    chunk = min(chunk_size, max(each, 1))
    for size, limit in ((chunk, each // chunk), (each % chunk, 1)):
        counts = [0] * devices
        for _ in range(devices * limit * (size > 0)):
            d = min((d for d in range(devices) if counts[d] < limit), key=lambda d: (load[d], d))
            clients, ranked = ranked[:size], ranked[size:]
            assigned[d] += clients
            counts[d] += 1
            load[d] += steps[clients[0]]
    order = balanced_order(steps, devices, chunk_size=chunk_size)
    assert order.tolist() == [k for own in assigned for k in own]


@given(rounds(), st.integers(0, 99))
def test_an_order_by_homes_has_every_client_once_and_is_as_balanced(case, seed):
    steps, devices, chunk_size = case
    homes = np.random.default_rng(seed).integers(-1, devices, len(steps))
    order = balanced_order(steps, devices, chunk_size=chunk_size, homes=homes)
    assert sorted(order.tolist()) == list(range(len(steps)))
    balanced = balanced_order(steps, devices, chunk_size=chunk_size)
    times = [max(loads(np.take(steps, o), devices, chunk_size)) for o in (order, balanced)]
    assert times[0] <= 1.02 * times[1]


def distances(homes, devices):
    """Return `[devices, clients per device]`, how many devices each client's row passes."""
    blocks = np.reshape(homes, (devices, -1))
    return np.where(blocks >= 0, (np.arange(devices)[:, None] - blocks) % devices, 0)


def hops(homes, devices, chunk_size=1):
    """Return how often devices send rows to the next one: each chunk's rows are sent together."""
    farthest = distances(homes, devices).max(0, initial=0)
    return sum(max(farthest[k : k + chunk_size]) for k in range(0, len(farthest), chunk_size))


@pytest.mark.parametrize(
    ("kind", "devices", "most"),
    [("equal", 2, 6), ("equal", 8, 12), ("log-normal", 2, 8), ("log-normal", 8, 25)],
)
def test_devices_rarely_send_rows_and_clients_away_from_home_are_the_last(kind, devices, most):
    rng = np.random.default_rng(0)
    sent, without = [], []
    for _ in range(20):
        steps = np.full(128, 5) if kind == "equal" else np.ceil(rng.lognormal(3, 1, 128))
        homes = rng.integers(0, devices, 128)
        ordered = homes[balanced_order(steps, devices, homes=homes)]
        assert np.all(np.diff(distances(ordered, devices)) >= 0)
        sent.append(hops(ordered, devices))
        without.append(hops(homes[balanced_order(steps, devices)], devices))
    assert np.mean(sent) < most
    assert np.mean(without) > 45


@given(st.lists(st.integers(-1, 2), min_size=6, max_size=6))
def test_devices_send_rows_as_rarely_as_possible(homes):
    """Clients with a home of -1 have no row to be sent."""
    homes = np.array(homes)
    fewest = min(hops(homes[[*o]], 3) for o in itertools.permutations(range(6)))
    assert hops(homes[balanced_order(np.ones(6), 3, homes=homes)], 3) == fewest


@pytest.mark.parametrize(("clients", "devices", "chunk_size"), [(128, 8, 1), (1024, 8, 8)])
def test_devices_share_absent_clients_and_send_rows_as_rarely_as_without(
    clients, devices, chunk_size
):
    rng = np.random.default_rng(0)
    steps = np.where(rng.random(clients) < 0.1, 0, 5)
    homes = np.where(steps, rng.integers(0, devices, clients), -1)
    order = balanced_order(steps, devices, chunk_size=chunk_size, homes=homes)
    balanced = balanced_order(steps, devices, chunk_size=chunk_size)
    times = [loads(steps[o], devices, chunk_size) for o in (order, balanced)]
    assert max(times[0]) == max(times[1])
    assert hops(homes[order], devices, chunk_size) <= 12


@given(rounds())
def test_idle_fraction_equals_a_loop_over_the_devices(case):
    steps, devices, chunk_size = case
    taken = loads(steps, devices, chunk_size)
    possible = devices * max(taken)
    wanted = 1 - sum(steps) / possible if possible else 0
    fraction = idle_fraction(steps, devices, chunk_size=chunk_size)
    assert fraction == pytest.approx(wanted, abs=1e-12)


@given(rounds())
def test_devices_differ_by_no_more_than_the_longest_client(case):
    steps, devices, _ = case
    if steps:
        taken = loads(np.array(steps)[balanced_order(steps, devices)], devices, 1)
        assert max(taken) - min(taken) <= max(steps)


@given(rounds())
def test_chunks_of_a_device_come_largest_first(case):
    steps, devices, chunk_size = case
    order = balanced_order(steps, devices, chunk_size=chunk_size)
    for own in np.array(steps, int)[order].reshape(devices, -1):
        assert np.all(np.diff(own) <= 0)


@pytest.mark.parametrize(("devices", "chunk_size"), [(1, 1), (2, 1), (8, 1), (8, 4)])
def test_log_normal_clients_leave_devices_idle_less_than_a_twentieth(devices, chunk_size):
    steps = np.ceil(np.random.default_rng(0).lognormal(1.5, 1.0, size=4096))
    arrangement = {"num_devices": devices, "chunk_size": chunk_size}
    order = balanced_order(steps, **arrangement)
    assert idle_fraction(steps[order], **arrangement) < 0.05
    if devices * chunk_size > 8:  # in random order, devices are mostly idle
        assert idle_fraction(steps, **arrangement) > 0.4


@pytest.mark.parametrize(
    ("steps", "sizes", "remedy"),
    [
        ([1, 2, 3], {"num_devices": 2}, "take 2 or 4 clients, or fewer devices"),
        ([1, -2], {}, "expected one number of at least 0 for each client"),
        ([[1, 2]], {}, "num_steps has shape [1, 2]"),
        ([1, 2], {"num_devices": 0}, "num_devices is 0, expected at least 1"),
        ([1, 2], {"chunk_size": 0}, "chunk_size is 0, expected at least 1"),
    ],
)
@pytest.mark.parametrize("function", [balanced_order, idle_fraction])
def test_bad_arguments_raise(function, steps, sizes, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        function(steps, **sizes)


def test_homes_of_other_clients_raise():
    with pytest.raises(ValueError, match=r"homes has shape \[3\], expected \[4\].*home_devices"):
        balanced_order([1, 2, 3, 4], 2, homes=[0, 1, 0])
