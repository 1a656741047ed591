"""Laws that hold for all data: transposes, sums of copies, order of participants, chunks, types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from federated_cases import assert_close
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_max,
    federated_mean,
    federated_min,
    federated_sum,
)

# Few shapes, so that JAX compiles each once, and many numbers.
SIZES = st.sampled_from([1, 4])
SHAPES = st.sampled_from([(), (3,), (2, 0)])
SEEDS = st.integers(0, 2**32 - 1)
REDUCTIONS = {
    "sum": federated_sum,
    "mean": federated_mean,
    "max": federated_max,
    "min": federated_min,
}


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights(seed, n):
    return np.random.default_rng((seed, 1)).uniform(0.1, 3, n).astype(np.float32)


def inner(a, b):
    return np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64))


def mixing(x):
    """A linear function that mixes the entries of a participant's value."""
    if x.ndim == 0:
        return 3 * x
    table = jnp.sin(jnp.arange(x.size**2, dtype=jnp.float32)).reshape(x.size, x.size)
    return (table @ x.ravel()).reshape(x.shape) + x[..., ::-1]


LINEAR = {
    "broadcast": lambda x, w: federated_broadcast(x),
    "sum": lambda x, w: federated_sum(x),
    "mean": lambda x, w: federated_mean(x),
    "weighted mean": federated_mean,
    "map": lambda x, w: federated_map(mixing, x),
    "all of them": lambda x, w: federated_mean(
        federated_map(lambda x: mixing(x) + x, federated_broadcast(federated_sum(x))), w
    ),
}


@functools.cache
def map_and_adjoint(name, n):
    """Return the shape of Ax as a function, and a compiled function for Ax and A^T y."""
    A = fedpax.program(clients=n)(LINEAR[name])
    shape = lambda x, w: jax.eval_shape(A, x, w).shape
    transposed = lambda x, w, y: jax.linear_transpose(lambda x: A(x, w), x)(y)[0]
    return shape, jax.jit(lambda x, w, y: (A(x, w), transposed(x, w, y)))


@given(st.sampled_from(sorted(LINEAR)), SIZES, SHAPES, SEEDS)
@settings(max_examples=30)
def test_the_transpose_is_the_adjoint(name, n, shape, seed):
    out_shape, both = map_and_adjoint(name, n)
    x, w = draw(seed, *(() if name == "broadcast" else (n,)), *shape), weights(seed, n)
    y = draw((seed, 2), *out_shape(x, w))
    forward, backward = both(x, w, y)
    scale = np.linalg.norm(forward) * np.linalg.norm(y) + 1
    np.testing.assert_allclose(inner(forward, y), inner(x, backward), rtol=1e-5, atol=1e-5 * scale)


@functools.cache
def of_copies(n):
    reductions = federated_sum, federated_mean, federated_max
    program = fedpax.program(clients=n)(lambda x: [f(federated_broadcast(x)) for f in reductions])
    return jax.jit(program)


@given(SIZES, SHAPES, SEEDS)
def test_the_sum_of_copies_is_n_times_the_value(n, shape, seed):
    x = draw(seed, *shape)
    assert_close(of_copies(n)(x), [n * x, x, x])


@jax.jit
@fedpax.program(clients=4)
def everything(x, w):
    return federated_mean(x, w), [f(x) for f in REDUCTIONS.values()]


@given(SEEDS, st.permutations(range(4)))
def test_the_order_of_participants_does_not_matter(seed, order):
    x, w = draw(seed, 4, 2, 3), weights(seed, 4)
    assert_close(everything(x[order], w[order]), everything(x, w))


mean_of_four = jax.jit(fedpax.program(clients=4)(federated_mean))
mean_of_five = jax.jit(fedpax.program(clients=5)(federated_mean))


@given(SEEDS, st.floats(0.1, 10))
def test_scaling_all_weights_leaves_the_mean_unchanged(seed, factor):
    x, w = draw(seed, 4, 3), weights(seed, 4)
    assert_close(mean_of_four(x, w * np.float32(factor)), mean_of_four(x, w))
    assert_close(mean_of_four(x, np.full(4, factor, np.float32)), mean_of_four(x))


@given(SEEDS)
def test_a_weight_of_two_counts_a_participant_twice(seed):
    x = draw(seed, 4, 3)
    assert_close(mean_of_four(x, np.array([1, 2, 1, 1])), mean_of_five(x[[0, 1, 1, 2, 3]]))


@functools.cache
def in_chunks(chunk_size):
    program = fedpax.program(clients=5, chunk_size=chunk_size)(
        lambda w, x: federated_mean(federated_map(lambda x: jnp.sum((w * x) ** 3), x))
    )
    return jax.jit(jax.value_and_grad(program, argnums=(0, 1)))


@given(SEEDS, st.integers(1, 6))
def test_chunks_of_any_size_change_nothing(seed, chunk_size):
    w, x = draw((seed, 2), 3), draw(seed, 5, 3)
    assert_close(in_chunks(chunk_size)(w, x), in_chunks(None)(w, x))


@jax.jit
@fedpax.program(clients=4)
def composed(x):
    one_after_another = federated_map(jnp.sin, federated_map(lambda x: x**2, x))
    return one_after_another, federated_map(lambda x: jnp.sin(x**2), x)


@given(SEEDS)
def test_a_map_after_a_map_is_the_map_of_both(seed):
    one_after_another, both = composed(draw(seed, 4, 3))
    assert_close(one_after_another, both)


DTYPES = ["float32", "bfloat16", "float16", "int8", "uint16", "int32", "bool", "complex64"]


@functools.cache
def typed(name):
    @jax.jit
    @fedpax.program(clients=4)
    def program(x, *weights):
        reduced = REDUCTIONS[name](x, *weights)
        return reduced, federated_broadcast(reduced), federated_map(lambda x: (x, x + x), x)

    return program


@given(st.sampled_from(DTYPES), st.sampled_from(sorted(REDUCTIONS)), st.booleans(), SEEDS)
@settings(max_examples=40)
def test_eval_shape_agrees_with_execution(dtype, name, weighted, seed):
    assume(dtype != "complex64" or name not in ("max", "min"))
    x = np.abs(draw(seed, 4, 3) * 9).astype(jnp.dtype(dtype))
    arguments = (x, weights(seed, 4)) if weighted and name == "mean" else (x,)
    described, result = jax.eval_shape(typed(name), *arguments), typed(name)(*arguments)
    for aval, value in zip(*map(jax.tree.leaves, (described, result)), strict=True):
        assert (aval.shape, aval.dtype) == (value.shape, value.dtype)
        assert aval.weak_type == value.weak_type
