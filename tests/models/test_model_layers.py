"""Parameters with logical axes, and the normalization of the layers."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from fedpax.models.layers import RMSNorm, gather_weight, normal_param


def test_a_parameter_has_the_names_of_its_axes_and_is_cast_before_use():
    kernel = normal_param(nnx.Rngs(0), (3, 2), 0.1, ("embed", "mlp"))
    assert kernel.shape == (3, 2) and kernel.logical_axes == ("embed", "mlp")
    assert gather_weight(kernel, "bfloat16").dtype == jnp.bfloat16


def test_a_norm_divides_by_the_root_of_the_mean_square():
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(RMSNorm(7, epsilon=0.5)(jnp.asarray(x)), expected, rtol=1e-5)
