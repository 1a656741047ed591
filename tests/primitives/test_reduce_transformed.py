"""Tests of the reductions under derivatives and vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal, positive
from reductions import REDUCTIONS, N, weighted_mean

import fedpax


def test_the_quotient_rule_in_the_weights():
    x, w = normal(N, 2), positive(N)
    plain = lambda x, w: jnp.tensordot(w, x, 1) / jnp.sum(w)
    expected = jax.jit(jax.jacrev(plain, argnums=(0, 1)))(x, w)
    for derivative in (jax.jacfwd, jax.jacrev):
        assert_close(jax.jit(derivative(weighted_mean, argnums=(0, 1)))(x, w), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("derivative", [jax.jacfwd, jax.jacrev, jax.hessian])
def test_an_extremum_has_the_derivative_of_jax_numpy(name, derivative):
    federated, plain = REDUCTIONS[name]
    x = normal(N, 2)
    x[1, 0] = x[3, 0] = 4 if name == "max" else -4  # attained twice
    program = fedpax.program(clients=N)(lambda x: federated(x) ** 2)
    plainly = lambda x: plain(x, axis=0) ** 2
    assert_close(jax.jit(derivative(program))(x), jax.jit(derivative(plainly))(x))


@pytest.mark.parametrize("name", ["max", "min"])
def test_an_infinite_extremum_has_a_derivative(name):
    federated, plain = REDUCTIONS[name]
    x = normal(N, 2)
    x[1:3, 0], x[2, 1] = (np.inf, -np.inf) if name == "max" else (-np.inf, np.inf)
    gradient = lambda fn: jax.grad(lambda x: jnp.sum(fn(x)))(x)
    gradients = gradient(fedpax.program(clients=N)(federated))
    np.testing.assert_array_equal(gradients, gradient(lambda x: plain(x, axis=0)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_derivatives_keep_the_dtype_of_half_precision(dtype):
    x, w = normal(N, 2).astype(dtype), positive(N).astype(dtype)
    for federated, _ in REDUCTIONS.values():
        loss = lambda x, f=federated: jnp.sum(fedpax.program(clients=N)(f)(x))
        assert jax.eval_shape(jax.grad(loss), x).dtype == dtype
    loss = lambda x, w: jnp.sum(weighted_mean(x, w))
    by_value, by_weight = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    assert by_value.dtype == by_weight.dtype == dtype
    w64 = np.asarray(w, np.float64)
    expected = np.repeat((w64 / w64.sum())[:, None], 2, 1)
    np.testing.assert_allclose(np.asarray(by_value, np.float64), expected, rtol=0.02)


@pytest.mark.each_value
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_over_any_axis(name, axis):
    federated, plain = REDUCTIONS[name]
    shape = [N, 3]
    shape.insert(axis, 4)
    x = normal(*shape)
    assert_close(
        jax.vmap(fedpax.program(clients=N)(federated), in_axes=axis)(x),
        jax.vmap(lambda x: plain(x, axis=0), in_axes=axis)(x),
    )


PLAIN_WEIGHTED = lambda x, w: jnp.tensordot(w, x, 1) / jnp.sum(w)


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (2, 1), (None, 0), (0, None), (None, 1)])
def test_vmap_over_values_or_weights_or_both(axes):
    x, w = normal(N, 2), positive(N)
    if axes[0] is not None:
        x = normal(*np.insert(x.shape, axes[0], 3))
    if axes[1] is not None:
        w = positive(*np.insert(w.shape, axes[1], 3))
    assert_close(jax.vmap(weighted_mean, axes)(x, w), jax.vmap(PLAIN_WEIGHTED, axes)(x, w))


@pytest.mark.each_value
@pytest.mark.parametrize("outer", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("inner", [(0, 0), (None, 0), (0, None)])
def test_vmap_of_vmap_keeps_weights_and_values_together(inner, outer):
    # Both batches have the same size, so mixing them up gives wrong numbers and no error.
    x = normal(*[3] * ((inner[0] is not None) + (outer[0] is not None)), N)
    w = positive(*[3] * ((inner[1] is not None) + (outer[1] is not None)), N)
    twice = lambda f: jax.vmap(jax.vmap(f, inner), outer)
    assert_close(twice(weighted_mean)(x, w), twice(PLAIN_WEIGHTED)(x, w))


@pytest.mark.parametrize("derivative", [jax.jacfwd, jax.hessian])
def test_derivatives_of_a_batch_with_weights_of_its_own(derivative):
    x, w = normal(3, N), positive(3, N)
    batched = lambda f: lambda x: jax.vmap(lambda x, w: f(x, w) ** 2)(x, w)
    result = jax.jit(derivative(batched(weighted_mean)))(x)
    assert_close(result, jax.jit(derivative(batched(PLAIN_WEIGHTED)))(x))


def test_weights_from_outside_of_the_mesh_have_gradients():
    # Weights must be sharded over explicit axes as values are, else their cotangents mismatch.
    program = fedpax.program(clients=4)(lambda x, n: fedpax.federated_mean(x, n) * n.sum())
    x, n = jnp.asarray(normal(4)), jnp.asarray(positive(4, seed=1))
    expected = jax.grad(lambda x, n: jnp.sum(x * n), argnums=(0, 1))(x, n)
    mesh = jax.make_mesh((4,), ("clients",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for run in (lambda f: f, jax.jit):
            assert_close(run(jax.grad(program, argnums=(0, 1)))(x, n), expected)
