"""Goodput under failures: closed forms, laws, and the published rows."""

import dataclasses

import numpy as np
import pytest

from fedpax.simulation import (
    Cluster,
    Failures,
    decoupled_goodput,
    draw_failures,
    restart_goodput,
)
from fedpax.simulation.chip_failures import SECONDS_PER_YEAR

DAY = 86_400.0
CLUSTER = Cluster(1_200_000)


def test_failures_are_those_of_independent_chips():
    failures = draw_failures(CLUSTER, 20 * DAY, seed=1)
    rate = CLUSTER.num_slices * CLUSTER.chips_per_slice / SECONDS_PER_YEAR
    in_repair = 256 / SECONDS_PER_YEAR * CLUSTER.repair_seconds
    expected = rate * 20 * DAY / (1 + in_repair)  # of slices that are up
    assert len(failures.seconds) == pytest.approx(expected, rel=0.02)
    gaps = np.diff(failures.seconds)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential
    last = {}
    for second, slice_, back in zip(*failures[:3], strict=True):
        assert last.get(slice_, 0.0) <= second
        last[slice_] = back
    again = draw_failures(CLUSTER, 20 * DAY, seed=1)
    for got, want in zip(again, failures, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("learners", [1, 2, 8])
def test_decoupled_goodput_has_its_closed_form(learners):
    """(1 - slices in repair) / (1 + failures per second of a learner x pause)."""
    failures = draw_failures(CLUSTER, 20 * DAY, seed=2)
    rate = len(failures.seconds) / failures.horizon / learners
    out = np.mean(np.minimum(failures.returns, failures.horizon) - failures.seconds)
    out *= len(failures.seconds) / failures.horizon / CLUSTER.num_slices
    running = 1 / (1 + rate * CLUSTER.reshard_seconds)
    result = decoupled_goodput(CLUSTER, failures, learners)
    assert result.goodput == pytest.approx((1 - out) * running, abs=0.003)
    assert result.uptime == pytest.approx(1 - (1 - running) ** learners, abs=0.003)


def test_restart_goodput_has_its_closed_form():
    """x / (e^x - 1) of the time between failures is kept, x = checkpoint time x failure rate."""
    cluster = dataclasses.replace(CLUSTER, checkpoint_seconds=10.0)
    failures = draw_failures(cluster, 20 * DAY, seed=3)
    active = 1 - cluster.num_spares / cluster.num_slices
    out = len(failures.seconds) / failures.horizon * cluster.repair_seconds / cluster.num_slices
    rate = len(failures.seconds) / failures.horizon * active / (1 - out)
    kept = 10.0 * rate / np.expm1(10.0 * rate)
    expected = active * kept / (1 + rate * cluster.restart_seconds)
    assert restart_goodput(cluster, failures).goodput == pytest.approx(expected, abs=0.004)


def test_three_failures_by_hand():
    """Four slices of one chip, 100 s: slice 0 fails at 10 s, 3 at 12 s, 1 at 50 s."""
    cluster = Cluster(
        4,
        chips_per_slice=1,
        reshard_seconds=5.0,
        restart_seconds=20.0,
        checkpoint_seconds=4.0,
        num_spares=1,
    )
    failures = Failures(
        np.array([10.0, 12.0, 50.0]), np.array([0, 3, 1]), np.array([30.0, 40.0, 60.0]), 100.0
    )
    # Elastic: pauses 10 to 15 and 50 to 55. Lost beside them: 15 to 30, 15 to 40, 55 to 60.
    elastic = decoupled_goodput(cluster, failures, 1)
    assert elastic.goodput == pytest.approx((4 * 90 - 15 - 25 - 5) / 400)
    assert elastic.uptime == pytest.approx(0.9)
    # Two learners of two slices. One pauses 10 to 15 and 50 to 55, the other one 12 to 17, when
    # slice 3 is out until 40. Both pause from 12 to 15.
    halves = decoupled_goodput(cluster, failures, 2)
    assert halves.goodput == pytest.approx((2 * 90 - 15 - 5 + 2 * 95 - 23) / 400)
    assert halves.uptime == pytest.approx(0.97)
    # Restart: 3 of 4 slices are needed. From 12 to 30 s there are 2, so training resumes at 50.
    # Whether the first and the last failure hit the spare is chance: 8 or 12 seconds until the last
    # checkpoint are kept, and 50 or 30 at the end.
    restart = restart_goodput(cluster, failures)
    kept = [(first + last) * 3 / 400 for first in (8, 12) for last in (30, 50)]
    assert any(restart.goodput == pytest.approx(value) for value in kept), restart


@pytest.mark.parametrize(
    ("chips", "restart", "published"),
    [
        (1_200_000, 0.27, {1: 0.58, 2: 0.70, 4: None, 8: 0.88, 16: 0.93}),
        (2_400_000, 0.18, {1: 0.40, 4: None, 8: 0.80, 16: 0.86}),
    ],
)
def test_the_published_rows_are_within_3_points(chips, restart, published):
    """Douillard et al., arXiv:2604.21428, at a failure per chip and year."""
    cluster = Cluster(chips)
    failures = draw_failures(cluster, 5 * DAY, seed=7)
    assert restart_goodput(cluster, failures).goodput == pytest.approx(restart, abs=0.03)
    for learners, goodput in published.items():
        result = decoupled_goodput(cluster, failures, learners)
        if goodput is not None:
            assert result.goodput == pytest.approx(goodput, abs=0.03), learners
        assert result.uptime > 0.995 or learners not in (4, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Cluster(100), "num_chips is 100 and chips_per_slice 256"),
        (lambda: Cluster(1000, repair_seconds=0.0), "repair_seconds is 0.0, expected above 0"),
        (lambda: Cluster(1000, reshard_seconds=-1.0), "reshard_seconds is -1.0"),
        (lambda: Cluster(1000, num_spares=3), "num_spares is 3, expected 0 to 2"),
        (
            lambda: decoupled_goodput(CLUSTER, draw_failures(CLUSTER, 9.0, 0), 0),
            "num_learners is 0, expected 1 to 4687, the number of slices",
        ),
    ],
)
def test_bad_settings_raise(call, words):
    with pytest.raises(ValueError, match=words):
        call()
