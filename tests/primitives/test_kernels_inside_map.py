"""Kernels written in Pallas run inside the mapped function."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import AxisType

import fedpax


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    def kernel(x_ref, factor_ref, out_ref):
        def row(i, _):
            out_ref[i, :] = jnp.tanh(x_ref[i, :]) * factor_ref[0]

        jax.lax.fori_loop(0, x_ref.shape[0], row, None)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, factor)


def test_a_kernel_in_a_loop_of_the_mapped_function() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 3, 8)).astype(np.float32)
    factor = random.normal(size=1).astype(np.float32)
    mesh = jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    @fedpax.program(clients=4)
    def run(x, factor):
        def local(x):
            return jax.lax.scan(lambda c, _: (scaled(c, factor), None), x, length=2)[0]

        return fedpax.federated_mean(fedpax.federated_map(local, x))

    want = np.mean(np.tanh(np.tanh(x) * factor) * factor, axis=0)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(run)(x, factor), want, rtol=1e-5)
