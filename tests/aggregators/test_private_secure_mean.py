"""Discrete Gaussian noise inside a secure sum: distribution, sensitivity, threshold, epsilon."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats
from scipy.signal import fftconvolve

import fedpax
from fedpax.aggregators import privacy_spent, private_secure_mean
from fedpax.aggregators.private_secure_mean import (
    DITHERED_STDDEV,
    dither_bits,
    draw_discrete_gaussian,
)
from fedpax.aggregators.random_numbers import normal_from_words
from fedpax.algorithms import fedavg

N, SIZE = 4, 20_000


@functools.cache
def combine(noise_multiplier, **settings):
    aggregator = private_secure_mean(
        max_norm=2.0, noise_multiplier=noise_multiplier, seed=1, num_neighbors=2, **settings
    )

    @jax.jit
    @fedpax.program(clients=N)
    def combine(updates, weights, round=0):
        state = aggregator.init(None)._replace(round=jnp.int32(round))
        mean, _, metrics = aggregator.aggregate(state, updates, weights)
        return mean, metrics

    return combine


def draw(scale=1.0, size=SIZE):
    return np.float32(scale * np.random.default_rng(0).standard_normal((N, size)))


@pytest.mark.slow
@pytest.mark.parametrize("stddev", [3.0, pytest.param(40.0, marks=pytest.mark.slow)])
def test_the_noise_is_discrete_gaussian(stddev):
    """Against the exact probabilities, by chi-square, and by variance and tails."""
    size = 100_000
    k = np.asarray(draw_discrete_gaussian(jax.random.key(0), jnp.zeros(size), stddev))
    edge = int(4 * stddev)
    values = np.arange(-edge, edge + 1)
    probability = np.exp(-(values**2) / (2 * stddev**2))
    probability /= np.exp(-(np.arange(-40 * edge, 40 * edge + 1) ** 2) / (2 * stddev**2)).sum()
    counts = np.bincount(k[np.abs(k) <= edge] + edge, minlength=values.size)
    common = probability * size > 10
    chi_square = np.sum((counts - probability * size)[common] ** 2 / (probability * size)[common])
    freedom = common.sum()
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)
    assert abs(k.var() / stddev**2 - 1) < 5 * np.sqrt(2 / size)
    assert abs(k.mean()) < 5 * stddev / np.sqrt(size)


@pytest.mark.slow
@pytest.mark.parametrize("stddev", [DITHERED_STDDEV, 30_000.0, 1e6])
def test_the_total_variation_distance_of_large_noise_is_the_stated_one(stddev):
    """Over all words that a number comes from."""
    width = 2 ** dither_bits(stddev)
    words = jnp.arange(2**24, dtype=jnp.uint32) << 8
    normal = normal_from_words(words, math.sqrt(stddev**2 - width**2 / 12))
    floors, most = np.asarray(jnp.floor(normal), int), int(6 * stddev)
    result = fftconvolve(np.bincount(floors + most) / 2**24, np.full(width, 1 / width))
    k = np.arange(len(result)) - most - (width // 2 - 1)
    expected = np.exp(-((k / stddev) ** 2) / 2)
    assert 0.5 * np.abs(result - expected / expected.sum()).sum() < 4e-6


@pytest.mark.parametrize("stddev", [2.0 * DITHERED_STDDEV, 1e6, 2e8])
def test_noise_of_a_large_deviation_is_discrete_gaussian(stddev):
    size = 1_000_000
    draw = jax.jit(lambda key: draw_discrete_gaussian(key, jnp.zeros((size // 100, 100)), stddev))
    k = np.asarray(draw(jax.random.key(3)))
    assert k.dtype == np.int32
    assert stats.kstest(k.ravel() / stddev, "norm").pvalue > 1e-4
    assert abs((k / stddev).var() - 1) < 5 * np.sqrt(2 / size)
    for modulus in (2, 16):  # a single float32 number would be even, or a multiple of 16, too often
        assert abs(np.mean(k % modulus == 0) * modulus - 1) < 5 * np.sqrt(modulus / size)


def test_the_uniform_part_of_large_noise_is_centered(monkeypatch):
    """The floor of a normal number is 1/2 below it in the mean."""
    module = sys.modules[draw_discrete_gaussian.__module__]
    monkeypatch.setattr(module, "normal_from_words", lambda words, _: jnp.zeros(words.shape))
    k = np.asarray(draw_discrete_gaussian(jax.random.key(5), jnp.zeros(100_000), DITHERED_STDDEV))
    width = 2 ** dither_bits(DITHERED_STDDEV)
    assert (k.min(), k.max()) == (1 - width // 2, width // 2)
    assert abs(k.mean() - 0.5) < 5 * width / math.sqrt(12 * k.size)


def test_the_mean_has_the_stated_noise_and_clips():
    weights = np.ones(N, np.float32)
    noise, metrics = combine(0.5)(np.zeros((N, SIZE), np.float32), weights)
    stated = 0.5 * 2.0 / N
    assert metrics["noise_stddev"] == pytest.approx(stated, rel=1e-3)  # rounding adds sqrt(d) / 2
    assert np.std(noise) == pytest.approx(stated, rel=5 / math.sqrt(2 * SIZE))
    updates = draw(0.02)
    updates[1] = np.inf
    updates[2] *= 1e-3
    # The noise depends on the round, not on the updates: the difference is their clipped mean.
    mean, _ = combine(0.5)(updates, weights)
    norms = np.linalg.norm(np.float64(updates), axis=1)
    finite = np.where(np.isfinite(updates), updates, 0)
    scale = np.where(np.isfinite(norms), np.minimum(1, 2.0 / norms), 0)
    expected = np.mean(scale[:, None] * finite, 0)
    np.testing.assert_allclose(np.float64(mean) - noise, expected, atol=2.0 / 2**20 + 1e-6)
    again, _ = combine(0.5)(updates, weights, 1)
    assert abs(np.corrcoef(again - expected, noise)[0, 1]) < 5 / math.sqrt(SIZE)


@pytest.mark.slow
def test_dropouts_down_to_the_threshold_leave_at_least_the_stated_noise():
    zeros = np.zeros((N, SIZE), np.float32)
    one_absent = np.float32([1, 0, 3, 1])
    noise, metrics = combine(0.5, min_participants=3)(zeros, one_absent)
    assert metrics["num_present"] == 3
    assert np.std(noise) == pytest.approx(0.5 * 2.0 / 3, rel=5 / math.sqrt(2 * SIZE))
    aborted, metrics = combine(0.5, min_participants=3)(draw(), np.float32([1, 0, 0, 1]))
    assert not np.any(aborted) and metrics["noise_stddev"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=(kind, kind))
    updates, weights = draw(size=64), np.ones(N, np.float32)
    expected, _ = combine(0.5)(updates, weights)
    with jax.set_mesh(mesh):
        placed = jax.device_put(updates, NamedSharding(mesh, P("clients", "fsdp")))
        aggregate, _ = combine(0.5)(placed, weights)
    np.testing.assert_allclose(aggregate, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_fedavg_with_distributed_privacy_learns_in_bfloat16():
    truth = jnp.array([1.0, -2.0, 3.0], jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (N, 2, 16, 3), jnp.bfloat16)
    cohort = fedpax.Cohort({"x": x, "y": x @ truth})

    def loss_fn(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2), {}

    algorithm = fedavg(
        loss_fn,
        cohort_size=N,
        client_optimizer=optax.sgd(0.1),
        aggregator=private_secure_mean(max_norm=0.5, noise_multiplier=0.1, seed=0),
    )
    state, step = algorithm.init(jnp.zeros(3, jnp.bfloat16)), jax.jit(algorithm.round)
    for _ in range(60):
        state, _ = step(state, cohort)
    assert state.params.dtype == jnp.bfloat16
    assert np.linalg.norm(np.float32(state.params) - np.float32(truth)) < 0.3


def test_epsilon_is_that_of_concentrated_privacy():
    """rho = T / (2 z^2): epsilon is at most rho + 2 sqrt(rho log(1 / delta)), and not far below."""
    pytest.importorskip("dp_accounting")
    for z, rounds in ((4.0, 1), (20.0, 100)):
        arguments = {"noise_multiplier": z, "num_rounds": rounds, "delta": 1e-6}
        rho = rounds / (2 * z**2)
        bound = rho + 2 * math.sqrt(rho * math.log(1e6))
        epsilon = privacy_spent(**arguments, discrete=True)
        assert 0.8 * bound < epsilon < bound
        assert privacy_spent(**arguments) < epsilon  # of continuous noise the distribution is known
    with pytest.raises(ValueError, match=r"without sampling\. Leave out"):
        privacy_spent(**arguments, discrete=True, sampling_probability=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_norm": 0.0}, "max_norm is 0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0"),
        ({"num_neighbors": 3}, "expected an even int"),
        ({"min_participants": 0}, "min_participants is 0, expected an int of at least 1"),
    ],
)
def test_bad_settings_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        private_secure_mean(**{"max_norm": 1.0, "noise_multiplier": 1.0, "seed": 0} | arguments)


@pytest.mark.parametrize(
    ("participants", "settings", "words"),
    [
        (4, {"min_participants": 5}, "min_participants is 5, expected at most the 4 .* Use fewer"),
        (10**8, {}, "100,000,000 participants .* Use fewer participants"),
        (4, {"noise_multiplier": 1e7}, r"noise_multiplier=10000000.0 leaves .* private_mean\(\)"),
    ],
)
def test_rounds_that_cannot_be_private_are_refused(participants, settings, words):
    aggregator = private_secure_mean(
        **{"max_norm": 1.0, "noise_multiplier": 1.0, "seed": 0} | settings
    )

    @fedpax.program(clients=participants)
    def average(updates):
        return aggregator.aggregate(aggregator.init(None), updates, None)[0]

    with pytest.raises(ValueError, match=words):
        jax.eval_shape(average, jax.ShapeDtypeStruct((participants, 1000), jnp.float32))
