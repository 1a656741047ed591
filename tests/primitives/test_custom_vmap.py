"""Functions with their own batching rule (`custom_vmap`) inside a mapped function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal

import fedpax
from fedpax import federated_map, federated_sum

N = 8


@jax.custom_batching.custom_vmap
def different_in_batches(x, y):
    return x * 2 + y


@different_in_batches.def_vmap
def _(axis_size, in_batched, x, y):
    return jnp.sin(x) * y, True


@jax.custom_batching.sequential_vmap
def one_by_one(x, y):
    return jnp.sin(x) * y


@jax.custom_vjp
def with_a_derivative(x, y):
    return different_in_batches(x, y)


with_a_derivative.defvjp(lambda x, y: (with_a_derivative(x, y), x), lambda x, c: (c * x, c * 3))


def in_loops(x, y):
    """Call the function in a scan, a conditional, a jit and a checkpoint."""
    called = jax.jit(jax.checkpoint(different_in_batches))
    total, _ = jax.lax.scan(lambda c, _: (called(c, y), None), x, length=2)
    return jax.lax.cond(jnp.sum(y) > 0, different_in_batches, lambda x, y: x * y, total, y)


# Plain JAX differentiates no `sequential_vmap`, so the function without its rule stands for it.
FUNCTIONS = {
    "rule": (different_in_batches, different_in_batches),
    "sequential": (one_by_one, lambda x, y: jnp.sin(x) * y),
    "in loops": (in_loops, in_loops),
    "custom vjp": (with_a_derivative, with_a_derivative),
}


def loss_of(mapped):
    return lambda x, y: jnp.sum(mapped(x, y) ** 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_those_of_plain_jax(name):
    fn, plain = FUNCTIONS[name]
    x, y = normal(N, 3), normal(N, 3, seed=1)
    program = fedpax.program(clients=N)(lambda x, y: federated_map(fn, x, y))
    both = lambda f: jax.jit(jax.value_and_grad(loss_of(f), argnums=(0, 1)))(x, y)
    assert_close(both(program), both(jax.vmap(plain)))


def test_forward_mode_and_second_derivatives():
    x, y = normal(N, 3), normal(N, 3, seed=1)
    program = fedpax.program(clients=N)(lambda x, y: federated_map(different_in_batches, x, y))
    plain = jax.vmap(different_in_batches)
    forward = lambda f: jax.jvp(f, (x, y), (y, x))
    assert_close(forward(program), forward(plain))
    hessian = lambda f: jax.jit(jax.hessian(loss_of(f)))(x, y)
    assert_close(hessian(program), hessian(plain), 1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_chunks_on_every_mesh(chunk_size, current_mesh):
    x, y = normal(2 * N, 3), normal(3, seed=1)
    program = fedpax.program(clients=2 * N, chunk_size=chunk_size)(
        lambda x, y: federated_sum(federated_map(lambda x: one_by_one(x, y), x))
    )
    plain = lambda x, y: jnp.sum(jnp.sin(x) * y, axis=0)
    gradient = lambda f: jax.jit(jax.grad(loss_of(f), argnums=(0, 1)))(x, y)
    assert_close(gradient(program), gradient(plain), 1e-4)


def test_without_arguments_the_function_runs_as_it_is():
    constant = jax.custom_batching.custom_vmap(lambda: jnp.float32(2.0))
    constant.def_vmap(lambda size, batched: (jnp.float32(3.0), False))
    program = fedpax.program(clients=N)(lambda x: federated_map(lambda x: x * constant(), x))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(program(x)))(normal(N)), [2.0] * N)
