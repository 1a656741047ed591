"""The merges of a syncer: against small steps of time, its laws, and its errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.simulation import Trace, draw_trace, exponential, fragment_syncs, lognormal, uniform

ISLANDS = 4


def random_trace(seed, *, fails=True, sends=True):
    return draw_trace(
        ISLANDS,
        seed=seed,
        seconds_per_step=lognormal(1.0, 0.5),
        seconds_to_receive=uniform(0.1, 0.5),
        seconds_to_send=uniform(0.1, 0.9) if sends else None,
        time_to_failure=exponential(25.0) if fails else None,
        time_to_return=exponential(10.0) if fails else None,
        horizon=2000.0,
    )


def check_by_replaying(trace, syncs, *, steps, quorum, grace, most):
    """Replay each island between the merges, step by step."""
    times = syncs.seconds.ravel()
    fragments = syncs.num_steps.shape[2]
    flat = [np.moveaxis(a, 1, 2).reshape(-1, ISLANDS) for a in syncs[:4]]
    num_steps, weights, receives, rejoins = flat
    unmerged = np.zeros((ISLANDS, fragments))
    arrivals = np.full((len(times), ISLANDS), np.inf)  # when `steps` steps have been sent
    for i in range(ISLANDS):
        step, send = trace.seconds_per_step[i], trace.seconds_to_send[i]
        failures = [d for d in trace.downtimes[i] if np.isfinite(d[0])]
        begin = 0.0  # of the current step
        for s, now in enumerate(times):
            before = times[s - 1] if s else 0.0
            came_back = [d[1] for d in failures if d[0] <= now and before < d[1] <= now]
            is_up = trace.is_up(now)[i]
            assert receives[s, i] == is_up
            assert rejoins[s, i] == (bool(came_back) and is_up)
            if not is_up:
                assert num_steps[s, i] == weights[s, i] == 0
                continue
            if came_back:
                begin = came_back[-1] + trace.seconds_to_receive[i]
                unmerged[i] = 0
            taken = 0
            while taken < most and begin + step + send <= now + 1e-7:
                begin += step
                taken += 1
                if taken == steps:
                    arrivals[s, i] = begin + send
            if taken == most:
                begin = max(begin, now)
            assert num_steps[s, i] == taken
            unmerged[i] += taken
            p = s % fragments
            assert weights[s, i] == unmerged[i, p]
            unmerged[i, p] = 0
    # The syncer merges at the quorum-th arrival, or while it waits for further ones.
    ordered = np.sort(arrivals, axis=1)
    return times - ordered[:, quorum - 1]


@settings(max_examples=20)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, ISLANDS),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
)
def test_merges_agree_with_the_trace(seed, quorum, steps, more, grace, fails):
    trace = random_trace(seed, fails=fails)
    settings = {"quorum": quorum, "grace_seconds": grace, "steps_per_sync": steps}
    syncs = fragment_syncs(
        trace, num_rounds=6, num_fragments=3, max_steps_per_sync=steps + more, **settings
    )
    late = check_by_replaying(
        trace, syncs, steps=steps, quorum=quorum, grace=grace, most=steps + more
    )
    if not fails:
        assert np.all(late > -1e-7) and np.all(late < grace + 1e-7)
        assert grace or np.all(np.abs(late) < 1e-7)
    assert np.all(np.diff(syncs.seconds.ravel()) > 0)
    for got, want in zip(
        fragment_syncs(
            trace, num_rounds=6, num_fragments=3, max_steps_per_sync=steps + more, **settings
        ),
        syncs,
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_a_quorum_of_all_that_waits_takes_equal_steps_at_any_speeds():
    syncs = fragment_syncs(
        random_trace(3, fails=False),
        num_rounds=5,
        num_fragments=2,
        steps_per_sync=4,
        quorum=ISLANDS,
    )
    assert np.all(syncs.num_steps == 4) and np.all(syncs.receives) and not np.any(syncs.rejoins)
    assert np.unique(syncs.weights[0, :, 0]).tolist() == [4.0]
    assert np.unique(syncs.weights[1:]).tolist() == [8.0]  # two merges of 4 steps ago


def test_a_quorum_of_one_follows_the_fastest_and_grace_gathers_more():
    trace = Trace(np.array([1.0, 1.25, 2.0, 8.0]))
    settings = {"num_rounds": 40, "steps_per_sync": 4, "quorum": 1, "max_steps_per_sync": 8}
    alone = fragment_syncs(trace, **settings)
    np.testing.assert_allclose(alone.seconds[:, 0], 4.0 * np.arange(1, 41))
    steps = alone.num_steps.sum(axis=(0, 2))
    assert steps.tolist() == [160, 128, 80, 20]  # nobody waits
    graced = fragment_syncs(trace, grace_seconds=1.0, **settings)
    ready = (graced.num_steps[:, :2] >= 4).mean()
    assert ready > (alone.num_steps[:, :2] >= 4).mean()
    tokens = fragment_syncs(trace, tokens_per_step=[1.0, 2.0, 3.0, 4.0], **settings)
    np.testing.assert_allclose(
        tokens.weights, alone.weights * np.array([1.0, 4.0, 9.0, 16.0])[:, None]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quorum": 5}, "quorum is 5, expected 1 to 4"),
        ({"steps_per_sync": 0}, "steps_per_sync is 0, expected at least 1"),
        ({"max_steps_per_sync": 2}, "max_steps_per_sync is 2, expected at least 3"),
        ({"grace_seconds": -1.0}, "grace_seconds is -1.0, expected at least 0"),
        ({"num_rounds": 10_000}, "fewer than quorum=2 islands are left for good. Lower quorum"),
    ],
)
def test_bad_arguments_raise(change, words):
    trace = Trace(np.ones(4), downtimes=np.array([[[50.0, np.inf]]] * 3 + [[[np.inf] * 2]]))
    with pytest.raises(ValueError, match=words):
        fragment_syncs(trace, **{"num_rounds": 3, "steps_per_sync": 3, "quorum": 2, **change})
