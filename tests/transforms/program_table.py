"""Programs written once, to be run with fedpax's functions and in plain JAX."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_max,
    federated_mean,
    federated_min,
    federated_sum,
)

N = 12
MESHES = ["no mesh", "automatic", "explicit", "clients explicit"]


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


W, X, WEIGHTS = normal(3, 2), normal(N, 5, 3, seed=1), np.abs(normal(N, seed=2)) + 0.1


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def cases(*values, fast):
    """Return all combinations of the parameters' values; those that are not named are slow."""
    assert fast <= set(itertools.product(*values)), fast
    return [
        pytest.param(*case, marks=[] if case in fast else pytest.mark.slow)
        for case in itertools.product(*values)
    ]


def local(w, x):
    def step(w, row):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(row @ w) ** 2))(w), None

    return jax.lax.scan(step, w, x)[0] - w


def close(actual, expected, tolerance=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.shape(a) == np.shape(b) and jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def together(*fns):
    """Return a function that runs several functions in one compiled program."""
    return jax.jit(lambda *args: [fn(*args) for fn in fns])


class Plain:
    """The functions in plain JAX."""

    map = staticmethod(lambda fn, *args: jax.vmap(fn)(*args))
    broadcast = staticmethod(
        lambda x: jax.tree.map(lambda a: jnp.broadcast_to(a, (N, *jnp.shape(a))), x)
    )
    sum = staticmethod(lambda x: jax.tree.map(lambda a: jnp.sum(a, 0), x))
    max = staticmethod(lambda x: jax.tree.map(lambda a: jnp.max(a, 0), x))
    min = staticmethod(lambda x: jax.tree.map(lambda a: jnp.min(a, 0), x))

    @staticmethod
    def mean(x, weights=None):
        if weights is None:
            return jax.tree.map(lambda a: jnp.mean(a, 0), x)
        return jax.tree.map(lambda a: jnp.tensordot(weights, a, 1) / jnp.sum(weights), x)


class Federated:
    """fedpax's functions under short names."""

    map = staticmethod(federated_map)
    broadcast = staticmethod(federated_broadcast)
    sum = staticmethod(federated_sum)
    mean = staticmethod(federated_mean)
    max = staticmethod(federated_max)
    min = staticmethod(federated_min)


class Rematerialized(Federated):
    """fedpax's functions, with every mapped function under `jax.checkpoint`."""

    map = staticmethod(lambda fn, *args: federated_map(jax.checkpoint(fn), *args))


def average(f, w, x, n):
    return w + f.mean(f.map(local, f.broadcast(w), x), n)


def metrics_beside_deltas(f, w, x, n):
    delta, steps, norm = f.map(
        lambda x: (local(w, x), jnp.int32(len(x)), jnp.linalg.norm(local(w, x))), x
    )
    return f.mean(delta), f.sum(steps), f.max(norm), f.min(norm), f.mean(norm, n)


def elementwise_between(f, w, x, n):
    delta = f.map(local, f.broadcast(w), x)
    clipped = jnp.where(jnp.abs(delta) > 0.1, jnp.sign(delta) * 0.1, jax.nn.relu(delta))
    scaled = clipped * n[:, None, None] + jnp.sum(delta**2, axis=(1, 2), keepdims=True)
    turned = jnp.transpose(scaled.astype(jnp.float16), (0, 2, 1)).reshape(len(x), -1)
    return f.sum(scaled), f.max(turned.astype(jnp.float32)), f.mean(jnp.argmax(turned, 1))


def weights_from_the_map(f, w, x, n):
    delta, weight = f.map(lambda x: (local(w, x), jnp.sum(x**2)), x)
    return f.mean(delta, weight * n), f.sum(weight)


def several_maps_on_shared_inputs(f, w, x, n):
    copy = f.broadcast(w)
    delta = f.map(local, copy, x)
    norm = f.map(lambda d, w: jnp.sum(d * w), delta, copy)
    other = f.map(lambda x: jnp.mean(x), x)
    return f.mean(delta), f.sum(norm), f.max(other), f.sum(norm * other)


def two_phases(f, w, x, n):
    delta = f.map(local, f.broadcast(w), x)
    mean = f.mean(delta, n)
    apart = f.map(lambda d, m: jnp.sum((d - m) ** 2), delta, f.broadcast(mean))
    again = f.map(local, f.broadcast(w + mean), x)
    return mean, f.mean(apart), f.mean(again - delta, n)


def weights_of_a_later_phase(f, w, x, n):
    delta, norm = f.map(lambda x: (local(w, x), jnp.sum(x**2)), x)
    return f.mean(delta, n * f.max(norm)), f.sum(norm / jnp.sum(norm))


def values_per_participant(f, w, x, n):
    delta, norm = f.map(lambda x: (local(w, x), jnp.sum(x)), x)
    return f.mean(delta), norm * 2, f.broadcast(w), jnp.argmax(norm)


def nothing_of_the_map(f, w, x, n):
    return f.sum(f.broadcast(w)), f.mean(x, n), f.max(n)


def rounds_in_a_scan(f, w, x, n):
    return jax.lax.scan(lambda w, _: (average(f, w, x, n), jnp.sum(w)), w, length=3)


def rematerialized_rounds(f, w, x, n):
    step = jax.checkpoint(lambda w, _: (average(f, w, x, n), jnp.sum(w)))
    return jax.lax.scan(step, w, length=3)


def elementwise_before(f, w, x, n):
    scaled = (x.astype(jnp.float16) / 2).astype(jnp.float32) - jnp.mean(w)
    return f.mean(f.map(local, f.broadcast(w), scaled), jnp.sqrt(n)), f.sum(f.map(jnp.sum, x * 2))


def server_arrays_between(f, w, x, n):
    delta = f.map(local, f.broadcast(w), x - jnp.sum(w, 1))
    moved = (delta + w) * w[0] - jnp.expand_dims(jnp.sin(w), 0)
    spread = jnp.exp(2 * jnp.broadcast_to(w, delta.shape))
    kept = jnp.where(w > 0, delta, 0)
    return f.mean(moved, n), f.sum(delta * spread), f.mean(kept), f.max(jnp.clip(delta, -w, w))


def reductions_of_numpy(f, w, x, n):
    delta = f.map(local, f.broadcast(w), x)
    count = f.map(lambda x: jnp.sum(x > 0).astype(jnp.int8), x)
    return jnp.mean(delta, 0), jnp.max(delta), jnp.sum(delta, (0, 2)), jnp.min(count), count.sum()


def under_a_condition(f, w, x, n):
    return jax.lax.cond(
        jnp.sum(w) > 0, lambda w: average(f, w, x, n), lambda w: w + jnp.sum(f.mean(x)), w
    )


def behind_calls(f, w, x, n):
    @jax.jit
    def jitted(w, x):
        return f.map(jax.jit(local), f.broadcast(w), x)

    delta = jax.checkpoint(jitted)(w, x)
    return jax.jit(lambda d: f.mean(jax.nn.gelu(d), n))(delta)


def gradient_inside(f, w, x, n):
    def loss(w):
        return f.mean(f.map(lambda w, x: jnp.sum(jnp.sin(x @ w)), f.broadcast(w), x), n)

    return jax.value_and_grad(loss)(w)


def gradient_of_a_square_inside(f, w, x, n):
    def loss(w):
        return f.mean(f.map(lambda w, x: jnp.sum(jnp.sin(x @ w)), f.broadcast(w), x), n) ** 2

    return jax.value_and_grad(loss)(w)


def constants_among_the_results(f, w, x, n):
    ones = f.map(lambda x: (1, jnp.float32(2.5), jnp.sum(x)), x)
    return f.sum(ones), f.mean(ones[1], n)


def small_and_boolean_types(f, w, x, n):
    def fn(x):
        return jnp.sum(x).astype(jnp.bfloat16), jnp.sum(x > 0).astype(jnp.int8), jnp.sum(x) > 0

    half, count, positive = f.map(fn, x)
    return f.mean(half.astype(jnp.float32)), f.max(count), f.min(positive), f.sum(positive)


def extremes(f, w, x, n):
    delta, norm = f.map(lambda x: (local(w, x), jnp.sum(x**2)), x)
    return f.max(jnp.sin(delta)), f.min(delta * norm[:, None, None])


def clipped_twice(f, w, x, n):
    delta = f.map(local, f.broadcast(w), x)
    length = jnp.sqrt(jnp.sum(delta**2, (1, 2), keepdims=True))
    clipped = delta * jnp.minimum(1, 0.1 / length) + jnp.sin(w)
    return f.mean(f.map(lambda d: d * jnp.tanh(d), clipped), n)


def variance(f, w, x, n):
    delta = f.map(local, f.broadcast(w), x)
    return f.mean((delta - f.mean(delta, n)) ** 2, n)


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        average,
        metrics_beside_deltas,
        elementwise_between,
        weights_from_the_map,
        several_maps_on_shared_inputs,
        two_phases,
        weights_of_a_later_phase,
        values_per_participant,
        nothing_of_the_map,
        rounds_in_a_scan,
        rematerialized_rounds,
        elementwise_before,
        server_arrays_between,
        reductions_of_numpy,
        under_a_condition,
        behind_calls,
        gradient_inside,
        gradient_of_a_square_inside,
        constants_among_the_results,
        small_and_boolean_types,
        extremes,
        clipped_twice,
        variance,
    )
}


def federated(name, chunk_size=1, size=N, functions=Federated):
    return fedpax.program(clients=size, chunk_size=chunk_size)(
        functools.partial(PROGRAMS[name], functions)
    )


def gradient_of(fn, argnums=(0, 1, 2)):
    def total(*args):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(*args)))

    return jax.grad(total, argnums)


@functools.cache
def expected(name):
    return jax.jit(functools.partial(PROGRAMS[name], Plain))(W, X, WEIGHTS)
