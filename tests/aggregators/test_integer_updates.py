"""Means of integer updates, such as counts, are float32, as in `federated_mean`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_aggregator import AGGREGATORS as EVERY_AGGREGATOR
from numpy_robust_means import bulyan_of, geometric_of, krum_of, trimmed_of

import fedpax
from fedpax.aggregators import (
    adaptive_clip,
    add_local_noise,
    add_noise,
    bulyan,
    chain,
    clip_by_norm,
    coordinate_median,
    geometric_median,
    krum,
    mean,
    private_mean,
    private_secure_mean,
    secure_mean,
    trimmed_mean,
)

COUNTS = np.random.default_rng(0).integers(0, 9, size=(8, 5)).astype(np.int32)
ROWS = np.float64(COUNTS)

AGGREGATORS = {
    "mean": (mean(), ROWS.mean(0)),
    "clip_by_norm": (chain(clip_by_norm(1e4), mean()), ROWS.mean(0)),
    "adaptive_clip": (chain(adaptive_clip(initial_norm=1e4), mean()), ROWS.mean(0)),
    "add_noise": (chain(add_noise(0.0, seed=0), mean()), ROWS.mean(0)),
    "add_local_noise": (chain(add_local_noise(0.0, seed=0), mean()), ROWS.mean(0)),
    "private_mean": (private_mean(max_norm=1e4, noise_multiplier=0.0, seed=0), ROWS.mean(0)),
    "secure_mean": (secure_mean(max_value=10.0, bits=24), ROWS.mean(0)),
    "private_secure_mean": (
        private_secure_mean(max_norm=40.0, noise_multiplier=1e-4, seed=0),
        ROWS.mean(0),
    ),
    "coordinate_median": (coordinate_median(), np.median(ROWS, 0)),
    "trimmed_mean": (trimmed_mean(0.25), trimmed_of(ROWS, 0.25)),
    "krum": (krum(1, num_selected=4), krum_of(ROWS, 1, 4)),
    "bulyan": (bulyan(1), bulyan_of(ROWS, 1)),
    "geometric_median": (geometric_median(), geometric_of(ROWS, np.ones(8))),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "private_secure_mean" else name
        for name in AGGREGATORS
    ],
)
def test_means_of_integers_are_not_truncated(name: str):
    aggregator, expected = AGGREGATORS[name]

    @jax.jit
    @fedpax.program(clients=8)
    def average(updates):
        return aggregator.aggregate(aggregator.init(updates[0]), updates, None)[0]

    aggregate = average(COUNTS)
    assert aggregate.dtype == jnp.float32
    np.testing.assert_allclose(
        aggregate, expected, atol=0.02 if name == "private_secure_mean" else 1e-3
    )
    assert np.any(expected != np.round(expected))


def test_all_other_aggregators_refuse_integers():
    """Their own tests see the messages."""
    others = {name.split()[0] for name in EVERY_AGGREGATOR} - AGGREGATORS.keys()
    assert others == {"compressed_mean", "quantized_mean"}
