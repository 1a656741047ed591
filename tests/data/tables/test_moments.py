"""Mean and variance over clients equal NumPy's in float64."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.aggregators import coordinate_median, private_mean, secure_mean
from fedpax.data.tables import federated_moments


def pooled(values):
    """The moments of all clients' values together."""
    counts = np.maximum((~np.isnan(values)).sum(axis=0), 1)
    mean = np.nansum(values, axis=0) / counts
    return mean, np.nansum((values - mean) ** 2, axis=0) / counts


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    offset=st.sampled_from([0.0, -3.0, 1e6, 1.7e9]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 100),
)
def test_equals_numpy(sizes, offset, scale, missing, seed):
    if abs(offset) > 1e6 * scale:
        scale = abs(offset) * 1e-6
    rng = np.random.default_rng(seed)
    clients = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    values = offset + scale * (rng.normal(size=(len(clients), 3)) + clients[:, None])
    values[:, 1] = offset  # constant
    values[rng.random(values.shape) < missing] = np.nan
    values[:, 2] = np.where(clients == clients[0], np.nan, values[:, 2])  # absent at a client
    moments = federated_moments(values, clients, len(sizes))
    mean, variance = pooled(values)
    deviation = np.maximum(np.sqrt(variance), 1e-6 * np.abs(mean))
    assert np.all(np.abs(moments.mean - mean) <= 1e-5 * deviation + 1e-12)
    np.testing.assert_allclose(
        moments.variance, variance, rtol=2e-5, atol=(1e-6 * abs(offset)) ** 2 * 1e-6 + 1e-12
    )
    assert variance[1] == 0 or moments.variance[1] == pytest.approx(variance[1])


def averaged_over_clients(values, clients, num_clients):
    """The mean and variance where each client has the same weight."""
    parts = [values[clients == k] for k in range(num_clients)]
    present = np.mean([(~np.isnan(x)).mean(axis=0) for x in parts], axis=0)
    first = np.mean([np.nan_to_num(x).mean(axis=0) for x in parts], axis=0) / present
    second = np.mean([np.square(np.nan_to_num(x - first)).mean(axis=0) for x in parts], axis=0)
    return first, second / present


def make_clients(num_clients=40):
    rng = np.random.default_rng(1)
    clients = np.repeat(np.arange(num_clients), rng.integers(5, 30, num_clients))
    values = rng.normal([50, -2], [10, 0.5], (len(clients), 2))
    values[rng.random(values.shape) < 0.1] = np.nan
    return values, clients


def test_a_secure_mean_sums_integers_and_comes_close():
    values, clients = make_clients()
    aggregator = secure_mean(max_value=1.0, bits=24, seed=0, num_neighbors=2)
    bounds = np.array([[0.0, 100.0], [-5.0, 5.0]])
    moments = federated_moments(values, clients, 40, aggregator, bounds=bounds)
    mean, variance = averaged_over_clients(values, clients, 40)
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(moments.variance, variance, rtol=1e-3)


def test_a_private_mean_clips_nothing_and_weighs_clients_equally():
    values, clients = make_clients()
    bounds = np.array([[0.0, 100.0], [-5.0, 5.0]])

    def limit(entries):
        assert entries == 6
        return 0.7 / entries**0.5

    def moments(noise):
        aggregator = private_mean(max_norm=0.7, noise_multiplier=noise, seed=3)
        return federated_moments(values, clients, 40, aggregator, bounds=bounds, limit=limit)

    expected, variance = averaged_over_clients(values, clients, 40)
    np.testing.assert_allclose(moments(0.0).mean, expected, rtol=1e-5)
    np.testing.assert_allclose(moments(0.0).variance, variance, rtol=1e-4)
    noisy = moments(0.1)
    assert 0.01 < abs(noisy.mean[0] - expected[0]) < 10
    assert np.all(noisy.variance >= 0)


def test_a_robust_aggregator_ignores_one_wrong_client():
    values, clients = make_clients()
    values[clients == 3] = 1e9
    mean, variance = pooled(values[clients != 3])
    moments = federated_moments(values, clients, 40, coordinate_median())
    assert np.all(np.abs(moments.mean - mean) < np.sqrt(variance))
    assert np.all(moments.variance < 2 * variance)


def test_values_outside_the_bounds_are_clipped():
    values = np.array([[-50.0], [5.0], [500.0]])
    moments = federated_moments(values, np.array([0, 0, 1]), 2, bounds=np.array([[0.0, 10.0]]))
    assert moments.mean.tolist() == pytest.approx([5.0])
    assert moments.variance.tolist() == pytest.approx([50 / 3])


def test_a_table_without_numbers_has_no_moments():
    moments = federated_moments(np.zeros((3, 0)), np.zeros(3, int), 1)
    assert moments.mean.shape == moments.variance.shape == (0,)
    assert not jax.tree.leaves(moments)[0].size
