"""Hashed random words and normal numbers: their distributions, and their independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedpax.aggregators.random_numbers import (
    hashed_indices,
    random_normal,
    random_words,
    rehash,
)

SHAPE = (300, 401)
KEYS = [jax.random.fold_in(jax.random.key(7), i) for i in range(8)]


@pytest.fixture(scope="module")
def normal() -> np.ndarray:
    draw = jax.jit(lambda key: random_normal(key, SHAPE))
    return np.stack([np.float64(draw(key)).ravel() for key in KEYS])


def test_words_are_uniform() -> None:
    draw = jax.jit(lambda key: random_words(key, SHAPE))
    for key in KEYS:
        words = np.asarray(draw(key)).ravel()
        assert stats.kstest(words / 2.0**32, "uniform").pvalue > 1e-4
        bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 32).mean(0)
        assert np.abs(bits - 0.5).max() < 5 * 0.5 / np.sqrt(words.size)


def test_normal_numbers_have_the_distribution_and_its_moments(normal: np.ndarray) -> None:
    for numbers in normal:
        assert stats.kstest(numbers, "norm").pvalue > 1e-4
    everything = normal.ravel()
    n = everything.size
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((everything**power).mean() - moment) < 5 * np.sqrt(variance / n)
    assert 4.3 < np.abs(everything).max() < 5.5


def test_normal_numbers_are_uncorrelated(normal: np.ndarray) -> None:
    n = normal.shape[1]
    between_keys = np.corrcoef(normal) - np.eye(len(KEYS))
    squares = np.corrcoef(normal**2) - np.eye(len(KEYS))
    assert max(np.abs(between_keys).max(), np.abs(squares).max()) < 5 / np.sqrt(n)
    for lag in (1, 2, SHAPE[1], 2**10):
        along = np.mean(normal[:, lag:] * normal[:, :-lag])
        assert abs(along) < 5 / np.sqrt(normal.size)


def test_sums_over_keys_are_normal(normal: np.ndarray) -> None:
    # As in a mean over participants, whose noise has one key each.
    assert stats.kstest(normal.sum(0) / np.sqrt(len(KEYS)), "norm").pvalue > 1e-4


def test_words_that_share_a_hash_are_uniform_and_independent() -> None:
    @jax.jit
    def draw() -> list[jax.Array]:
        first, *seeds = jax.random.bits(jax.random.key(3), (5,), jnp.uint32)
        hashed = hashed_indices(first, (100, 201))
        return [rehash(hashed, seed).ravel() for seed in seeds]

    words = np.array(draw())
    n = words.shape[1]
    for word in words:
        assert stats.kstest(word / 2.0**32, "uniform").pvalue > 1e-4
    # Each pair of bits of two sequences, and the words as numbers.
    bits = np.unpackbits(words.view(np.uint8).reshape(len(words), n, 4), axis=2)
    bits = bits.astype(np.float32) - 0.5
    for i in range(len(words)):
        for j in range(i):
            assert np.abs(4 * bits[i].T @ bits[j] / n).max() < 6 / np.sqrt(n)
    assert np.abs(np.corrcoef(words / 2.0**32) - np.eye(len(words))).max() < 5 / np.sqrt(n)
