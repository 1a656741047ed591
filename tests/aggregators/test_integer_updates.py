"""Means of integer updates, such as counts, are float32, as in `federated_mean`."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.aggregators import (
    chain,
    clip_by_norm,
    mean,
    private_mean,
    private_secure_mean,
    secure_mean,
)

COUNTS = np.random.default_rng(0).integers(0, 9, size=(8, 5)).astype(np.int32)

AGGREGATORS = {
    "clip_by_norm": chain(clip_by_norm(1e4), mean()),
    "private_mean": private_mean(max_norm=1e4, noise_multiplier=0.0, seed=0),
    "secure_mean": secure_mean(max_value=10.0, bits=24),
    "private_secure_mean": private_secure_mean(max_norm=40.0, noise_multiplier=1e-4, seed=0),
}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_means_of_integers_are_not_truncated(name: str):
    aggregator = AGGREGATORS[name]

    @fedpax.program(clients=8)
    def average(updates):
        return aggregator.aggregate(aggregator.init(updates[0]), updates, None)[0]

    found = average(COUNTS)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, COUNTS.mean(0), atol=0.02)
