"""Clipping to a fixed norm, and to one that follows a quantile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.aggregators import adaptive_clip, chain, clip_by_norm, mean

N = 8


def draw(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": np.float32(rng.standard_normal((N, 4, 3))),
        "b": np.float32(rng.standard_normal(N)),
    }


def norms_of(updates):
    return np.sqrt(sum(np.sum(np.float64(x).reshape(N, -1) ** 2, 1) for x in updates.values()))


@functools.cache
def clipped(max_norm):
    aggregator = chain(clip_by_norm(max_norm), mean())

    @jax.jit
    @fedpax.program(clients=N)
    def combine(updates, weights=None):
        aggregated, _, metrics = aggregator.aggregate(aggregator.init(None), updates, weights)
        return aggregated, metrics

    return combine


@pytest.mark.parametrize("max_norm", [3.5, 100.0])
def test_equals_numpy(max_norm):
    updates, weights = draw(), np.float32([1, 2, 0, 4, 0, 1, 1, 1])
    result, metrics = clipped(max_norm)(updates, weights)
    norms, here = norms_of(updates), weights != 0
    scale = np.minimum(1, max_norm / norms)
    for key, x in updates.items():
        expected = np.average(scale.reshape(-1, *[1] * (x.ndim - 1)) * x, axis=0, weights=weights)
        np.testing.assert_allclose(result[key], expected, rtol=1e-5, atol=1e-6)
    assert metrics["clipped_fraction"] == pytest.approx((norms > max_norm)[here].mean())
    assert metrics["participant_norm"] == pytest.approx(norms[here].mean(), rel=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_an_update_without_a_finite_norm_counts_as_zero(value):
    updates, without = draw(1), draw(1)
    updates["w"][3, 0, 0] = value
    for x in without.values():
        x[3] = 0.0
    result, metrics = clipped(3.5)(updates)
    expected, _ = clipped(3.5)(without)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    norms = norms_of(without)
    assert metrics["clipped_fraction"] == ((norms > 3.5).sum() + 1) / N
    # The metrics of absent participants do not count.
    _, metrics = clipped(3.5)(updates, np.float32(np.arange(N) != 3))
    assert np.isfinite(metrics["participant_norm"])


def test_bfloat16_updates_are_clipped_in_float32():
    updates = {"w": jnp.full((N, 1000), 0.1, jnp.bfloat16)}
    result, metrics = clipped(3.5)(updates)
    assert result["w"].dtype == jnp.bfloat16
    norm = 0.1 * np.sqrt(1000)
    assert metrics["participant_norm"] == pytest.approx(norm, rel=2e-3)  # 0.1 in bfloat16
    wide, metrics = clipped(0.5)(updates)
    np.testing.assert_allclose(np.linalg.norm(np.float32(wide["w"])), 0.5, rtol=5e-3)
    assert metrics["clipped_fraction"] == 1


@functools.cache
def adaptive(**settings):
    aggregator = chain(adaptive_clip(**settings), mean())

    @jax.jit
    @fedpax.program(clients=N)
    def combine(state, updates, weights=None):
        return aggregator.aggregate(state, updates, weights)

    return aggregator.init(None), combine


def test_adaptive_clipping_equals_numpy():
    state, combine = adaptive(initial_norm=2.0, quantile=0.75, learning_rate=0.3)
    weights, norm = np.float32([1, 1, 0, 1, 5, 1, 1, 1]), 2.0
    for round_number in range(5):
        updates = draw(round_number)
        aggregated, state, metrics = combine(state, updates, weights)
        expected, _ = clipped(1.0)({k: x / np.float32(norm) for k, x in updates.items()}, weights)
        for key in updates:
            np.testing.assert_allclose(aggregated[key], norm * expected[key], rtol=1e-4, atol=1e-5)
        assert metrics["max_norm"] == pytest.approx(norm, rel=1e-5)
        below = norms_of(updates)[weights != 0] <= norm
        norm *= np.exp(-0.3 * (below.mean() - 0.75))
        assert state.max_norm == pytest.approx(norm, rel=1e-5)
        assert state.round == round_number + 1


def test_the_norm_converges_to_the_quantile():
    state, combine = adaptive(initial_norm=0.01, quantile=0.5)
    updates = {"x": np.float32(np.arange(1.0, 9.0))}
    for _ in range(80):
        _, state, _ = combine(state, updates)
    assert 4.0 <= state.max_norm <= 5.0  # four of eight norms are at most 4


def test_the_count_has_the_stated_noise():
    """With learning rate 1, the noise of count / N is in the logarithm of the norm."""
    state, combine = adaptive(
        initial_norm=1.0, quantile=0.5, learning_rate=1.0, count_stddev=4.0, seed=7
    )
    updates = {"x": np.float32([0.0] * 4 + [1e9] * 4)}  # half below any norm
    steps = []
    for _ in range(400):
        _, state, metrics = combine(state, updates)
        steps.append(np.log(state.max_norm) - np.log(metrics["max_norm"]))
    assert abs(np.mean(steps)) < 4 * 0.5 / np.sqrt(400)
    assert np.std(steps) == pytest.approx(4.0 / N, rel=0.15)  # 4 standard errors of 1 / sqrt(800)


def test_nobody_present_changes_nothing():
    state, combine = adaptive(initial_norm=2.0, quantile=0.75, learning_rate=0.3)
    aggregated, after, _ = combine(state, draw(), np.zeros(N, np.float32))
    assert after.max_norm == 2.0
    assert not any(np.any(x) for x in jax.tree.leaves(aggregated))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: clip_by_norm(0.0),
            ValueError,
            "is 0.0, expected a positive finite number. Use",
        ),
        (
            lambda: clip_by_norm(-1.0),
            ValueError,
            "is -1.0, expected a positive finite number. Use",
        ),
        (
            lambda: clip_by_norm(np.nan),
            ValueError,
            "max_norm is nan, expected a positive finite number",
        ),
        (
            lambda: clip_by_norm(None),
            TypeError,
            "max_norm is None, expected a positive finite number",
        ),
        (lambda: adaptive_clip(initial_norm=0.0), ValueError, "initial_norm is 0"),
        (
            lambda: adaptive_clip(initial_norm=1.0, quantile=50),
            ValueError,
            r"quantile is 50, expected a number from 0 to 1\. The median is 0\.5",
        ),
        (
            lambda: adaptive_clip(initial_norm=1.0, count_stddev=-1.0),
            ValueError,
            "count_stddev is -1.0, expected .* at least 0",
        ),
    ],
)
def test_bad_settings_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()
