import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.data.populations.scheduling import balanced_order, wasted_steps


@st.composite
def rounds(draw):
    devices = draw(st.integers(1, 8))
    each = draw(st.integers(0, 12))
    steps = draw(st.lists(st.integers(0, 50), min_size=devices * each, max_size=devices * each))
    return steps, devices, draw(st.integers(1, 5))


def loads(steps, devices, chunk_size):
    """What each device takes, by loops."""
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
def test_order_holds_every_client_once(case):
    steps, devices, chunk_size = case
    order = balanced_order(steps, devices, chunk_size=chunk_size)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(steps)))


@given(rounds())
def test_wasted_steps_are_those_of_a_loop_over_the_devices(case):
    steps, devices, chunk_size = case
    taken = loads(steps, devices, chunk_size)
    possible = devices * max(taken)
    wanted = 1 - sum(steps) / possible if possible else 0
    found = wasted_steps(steps, devices, chunk_size=chunk_size)
    assert found == pytest.approx(wanted, abs=1e-12)


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
def test_log_normal_clients_waste_under_a_twentieth(devices, chunk_size):
    steps = np.ceil(np.random.default_rng(0).lognormal(1.5, 1.0, size=4096))
    arrangement = {"devices": devices, "chunk_size": chunk_size}
    order = balanced_order(steps, **arrangement)
    assert wasted_steps(steps[order], **arrangement) < 0.05
    if devices * chunk_size > 8:  # as they come, most of the time is lost
        assert wasted_steps(steps, **arrangement) > 0.4


@pytest.mark.parametrize(
    ("steps", "sizes", "remedy"),
    [
        ([1, 2, 3], {"devices": 2}, "take 2 or 4 clients, or fewer devices"),
        ([1, -2], {}, "expected one number of at least 0 for each client"),
        ([[1, 2]], {}, "steps has shape [1, 2]"),
        ([1, 2], {"devices": 0}, "devices is 0, but must be at least 1"),
        ([1, 2], {"chunk_size": 0}, "chunk_size is 0, but must be at least 1"),
    ],
)
@pytest.mark.parametrize("function", [balanced_order, wasted_steps])
def test_bad_input_is_told(function, steps, sizes, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        function(steps, **sizes)
