import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.models.attention.causal import attention_mask, masked_attention, rotary, rotate

attend = jax.jit(masked_attention)


def test_scores_depend_on_distances_between_positions() -> None:
    """<rotate(q, m), rotate(k, n)> = <rotate(q, m + s), rotate(k, n + s)>."""
    random = np.random.default_rng(0)
    query, key = random.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    @jax.jit
    def dot(m: int, n: int) -> jax.Array:
        q, k = (rotate(x, rotary(jnp.array([[p]]), 16, 100.0)) for x, p in ((query, m), (key, n)))
        return jnp.vdot(q, k)

    def score(m: int, n: int) -> float:
        return float(dot(m, n))

    for m, n in random.integers(0, 50, (5, 2)):
        assert score(m, n) == pytest.approx(score(m + 31, n + 31), rel=1e-3, abs=1e-4)
    assert score(3, 3) == pytest.approx(float(np.vdot(query, key)), rel=1e-5)
    assert abs(score(3, 3) - score(4, 3)) > 0.01


def test_equals_the_attention_of_jax() -> None:
    """`jax.nn.dot_product_attention` is an independent implementation."""
    random = np.random.default_rng(1)
    query = random.normal(size=(2, 9, 6, 8)).astype(np.float32)
    key, value = random.normal(size=(2, 2, 9, 2, 8)).astype(np.float32)
    mask = attention_mask(9, random.integers(0, 2, (2, 9)).cumsum(axis=1))
    expected = jax.jit(jax.nn.dot_product_attention)(query, key, value, mask=mask[:, None])
    np.testing.assert_allclose(attend(query, key, value, mask), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_scores_are_summed_in_float32() -> None:
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=(1, 8, 2, 64)), jnp.bfloat16)
    result = attend(x, x, x, attention_mask(8))
    assert result.dtype == jnp.bfloat16
    exact = attend(*(x.astype(jnp.float32),) * 3, attention_mask(8))
    np.testing.assert_allclose(result.astype(np.float32), exact, rtol=0.02, atol=0.02)


def test_large_scores_stay_finite() -> None:
    random = np.random.default_rng(3)
    x = 1e3 * random.normal(size=(1, 5, 1, 8)).astype(np.float32)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda x: jnp.sum(masked_attention(x, x, x, attention_mask(5))))
    )(x)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_padding_attends_to_padding_only() -> None:
    mask = attention_mask(5, jnp.array([[1, 1, 2, 0, 0], [1, 1, 1, 1, 1]]))
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))
    np.testing.assert_array_equal(mask[1], np.tri(5, dtype=bool))
    assert attention_mask(5).shape == (1, 5, 5)
