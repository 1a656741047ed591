"""The sorting network, against NumPy."""

import jax
import numpy as np
import pytest

from fedpax.aggregators.coordinate_means import sort_rows


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 33])
def test_sort_rows_equals_numpy(n):
    x = np.float32(np.random.default_rng(n).standard_normal((n, 4, 5)))
    x[0], x[:, 1, 2], x[-1, :, 3] = -np.inf, 0.5, np.inf
    np.testing.assert_array_equal(jax.jit(sort_rows)(x), np.sort(x, 0))


def test_derivatives_follow_the_values():
    """A row that is not selected has no effect, though its derivative is NaN; of ties, one has."""
    rng = np.random.default_rng(0)
    x, tangent = np.float32(rng.standard_normal((2, 6, 50)))
    x[2], tangent[2] = np.inf, np.nan
    pushed = jax.jit(lambda *pair: jax.jvp(lambda x: sort_rows(x)[:5], pair[:1], pair[1:]))
    result, derivative = pushed(x, tangent)
    order = np.argsort(x, 0)[:5]
    np.testing.assert_array_equal(result, np.take_along_axis(x, order, 0))
    np.testing.assert_array_equal(derivative, np.take_along_axis(tangent, order, 0))
    gradient = jax.jit(jax.grad(lambda x: sort_rows(x)[1].sum()))(np.ones((6, 50), np.float32))
    np.testing.assert_array_equal(np.sort(gradient, 0)[-2:, 0], [0, 1])
