"""Noise from the operating system: its exact distribution, and its independence."""

import numpy as np
import pytest

from fedpax.transforms.stage_noise import discrete_gaussian, draw_noise

SIZE = 100_000


def seeded(seed):
    return np.random.default_rng(seed).bytes


@pytest.mark.parametrize("stddev", [0.4, 3.0, 40.3, 64.0])
def test_numbers_have_the_probabilities_of_the_discrete_gaussian(stddev):
    """By chi-square against the exact probabilities."""
    k = discrete_gaussian(stddev, (SIZE // 10, 10), seeded(0))
    assert (k.shape, k.dtype) == ((SIZE // 10, 10), np.int32)
    edge = int(4 * stddev) + 1
    values = np.arange(-edge, edge + 1)
    wide = np.arange(-40 * edge, 40 * edge + 1)
    density = lambda k: np.exp(-(k**2) / (2 * stddev**2))
    probability = density(values) / density(wide).sum()
    counts = np.bincount((k[np.abs(k) <= edge] + edge).ravel(), minlength=values.size)
    common = probability * SIZE > 10
    expected = (probability * SIZE)[common]
    chi_square = np.sum((counts[common] - expected) ** 2 / expected)
    assert abs(chi_square - common.sum()) < 5 * np.sqrt(2 * common.sum())


@pytest.mark.parametrize("stddev", [1000.0, 303_000.0, 2e8])
def test_large_numbers_have_the_stated_variance_and_no_gaps(stddev):
    k = discrete_gaussian(stddev, (SIZE,), seeded(1)).astype(np.float64)
    assert abs(k.var() / stddev**2 - 1) < 5 * np.sqrt(2 / SIZE)
    assert abs(k.mean()) < 5 * stddev / np.sqrt(SIZE)
    assert abs((k**4).mean() / k.var() ** 2 - 3) < 5 * np.sqrt(96 / SIZE)
    for modulus in (2, 16):
        assert abs(np.mean(k % modulus == 0) * modulus - 1) < 5 * np.sqrt(modulus / SIZE)


def test_sums_beyond_32_bits_wrap():
    k = discrete_gaussian(1e10, (1000,), seeded(2))
    assert abs(np.float64(k).std() / (2**32 / np.sqrt(12)) - 1) < 0.2  # uniform


def test_each_call_draws_new_noise_of_the_described_values():
    described = [
        {"name": "noise 0", "shape": [SIZE], "dtype": "int32", "stddev": 50.0},
        {"name": "noise 1", "shape": [], "dtype": "int32", "stddev": 5.0},
    ]
    first, second = draw_noise(described), draw_noise(described)
    assert first["noise 1"].shape == () and list(first) == ["noise 0", "noise 1"]
    correlation = np.corrcoef(first["noise 0"], second["noise 0"])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(SIZE)


def test_normal_numbers_have_their_moments():
    described = [{"name": "n", "shape": [3, 100_001], "dtype": "float32", "stddev": 2.0}]
    x = draw_noise(described, seeded(3))["n"]
    assert x.shape == (3, 100_001) and x.dtype == np.float32
    x = np.float64(x).ravel() / 2.0
    within = 5 / np.sqrt(x.size)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(x**power) - moment) < within * np.sqrt(variance)
    assert abs(np.mean(x < 1.0) - 0.841345) < within
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < within


def test_the_memory_does_not_grow_with_the_noise():
    asked = []

    def random(count):
        asked.append(count)
        return np.random.default_rng(len(asked)).bytes(count)

    k = discrete_gaussian(40.0, (500_000,), random)
    assert max(asked) <= 8 * 2**18
    assert abs(k.std() / 40 - 1) < 0.01 and len(np.unique(k[-100_000:])) > 200
