"""Krum and Bulyan: with too few participants, with one wrong coordinate, and with equal values."""

import jax
import numpy as np
import pytest
from numpy_robust_means import bulyan_of, krum_of

import fedpax
from fedpax.aggregators import bulyan, krum

N = 8


@pytest.mark.parametrize("num_selected", [1, 3])
def test_krum_selects_no_wrong_update_however_few_are_present(num_selected):
    """Below its bound, 5, the result is 0. Multi-Krum averages at most `m - f - 2` updates."""
    aggregator = krum(1, num_selected=num_selected)

    @jax.jit
    @fedpax.program(clients=N)
    def combine(updates, weights):
        return aggregator.aggregate(aggregator.init(None), updates, weights)[0]

    updates = np.float32(np.random.default_rng(0).uniform(1, 2, (N, 3)))
    updates[0] = -100
    for present in range(N + 1):
        weights = np.float32(np.arange(N) < present)
        combined = np.asarray(combine(updates, weights))
        if present < 5:
            assert np.all(combined == 0)
        else:
            assert np.all((combined >= 1) & (combined <= 2))
            expected = krum_of(updates[:present], 1, min(num_selected, present - 1 - 2))
            np.testing.assert_allclose(combined, expected, rtol=1e-6)


def test_bulyan_is_zero_with_too_few_present():
    combine = fedpax.program(clients=N)(lambda *args: bulyan(1).aggregate(None, *args)[0])
    aggregate = [combine(np.ones(N, np.float32), np.float32(np.arange(N) < m)) for m in (6, 7)]
    assert [leaf.item() for leaf in aggregate] == [0.0, 1.0]


def test_bulyan_bounds_each_coordinate():
    """Krum selects an update that is wrong in one coordinate of many; Bulyan bounds its effect."""
    rng = np.random.default_rng(0)
    updates = np.float32(rng.standard_normal((N, 1000)))
    updates[0] = updates[1:].mean(0)
    updates[0, 0] += 20.0  # the distance of two honest updates is about sqrt(2000) = 45

    def first(aggregator):
        @jax.jit
        @fedpax.program(clients=N)
        def combine(updates):
            return aggregator.aggregate(aggregator.init(None), updates, None)[0]

        return combine(updates)[0]

    assert first(krum(1)) > 15
    assert abs(first(bulyan(1))) < 2


@pytest.mark.parametrize("seed", range(3))
def test_bulyan_passes_many_equal_values_below_the_median(seed):
    """A coordinate may have more equal values than Bulyan averages: here 3 of a selection of 9."""
    rng = np.random.default_rng(seed)
    updates = np.float32(rng.standard_normal((15, 100)))
    updates[:, 50:] = rng.integers(0, 2, (15, 50))
    aggregate = fedpax.program(clients=15)(lambda u: bulyan(3).aggregate(None, u, None)[0])(updates)
    np.testing.assert_allclose(aggregate, bulyan_of(np.float64(updates), 3), atol=1e-5)
