"""The sorting network, against NumPy."""

import jax
import numpy as np
import pytest

from fedpax.aggregators.sorting_network import sort_rows


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 33])
def test_sort_rows_equals_numpy(n):
    x = np.float32(np.random.default_rng(n).standard_normal((n, 4, 5)))
    x[0], x[:, 1, 2], x[-1, :, 3] = -np.inf, 0.5, np.inf
    np.testing.assert_array_equal(jax.jit(sort_rows)(x), np.sort(x, 0))
