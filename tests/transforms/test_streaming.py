"""A streamed program computes what plain JAX computes, and holds no more than it must."""

import functools
import re

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
from fedpax.parallel.collectives import collectives
from fedpax.primitives._jax import inner_jaxprs
from fedpax.transforms.streaming import stream

N = 12


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


W, X, WEIGHTS = normal(3, 2), normal(N, 5, 3, seed=1), np.abs(normal(N, seed=2)) + 0.1


def local(w, x):
    def step(w, row):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(row @ w) ** 2))(w), None

    return jax.lax.scan(step, w, x)[0] - w


def close(found, expected, tolerance=2e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.shape(a) == np.shape(b) and jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# ---- programs, each written twice: with fedpax and with `jax.vmap`


class Plain:
    """The same names in plain JAX."""

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
    turned = jnp.transpose(scaled.astype(jnp.float16), (0, 2, 1)).reshape(N, -1)
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


def two_stages(f, w, x, n):
    delta = f.map(local, f.broadcast(w), x)
    mean = f.mean(delta, n)
    apart = f.map(lambda d, m: jnp.sum((d - m) ** 2), delta, f.broadcast(mean))
    again = f.map(local, f.broadcast(w + mean), x)
    return mean, f.mean(apart), f.mean(again - delta, n)


def weights_of_a_later_stage(f, w, x, n):
    delta, norm = f.map(lambda x: (local(w, x), jnp.sum(x**2)), x)
    return f.mean(delta, n * f.max(norm)), f.sum(norm / jnp.sum(norm))


def wanted_of_each(f, w, x, n):
    delta, norm = f.map(lambda x: (local(w, x), jnp.sum(x)), x)
    return f.mean(delta), norm * 2, f.broadcast(w), jnp.sum(norm)


def nothing_of_the_map(f, w, x, n):
    return f.sum(f.broadcast(w)), f.mean(x, n), f.max(n)


def rounds_in_a_scan(f, w, x, n):
    return jax.lax.scan(lambda w, _: (average(f, w, x, n), jnp.sum(w)), w, length=3)


def elementwise_before(f, w, x, n):
    scaled = (x.astype(jnp.float16) / 2).astype(jnp.float32) - jnp.mean(w)
    return f.mean(f.map(local, f.broadcast(w), scaled), jnp.sqrt(n)), f.sum(f.map(jnp.sum, x * 2))


def under_a_condition(f, w, x, n):
    return jax.lax.cond(
        jnp.sum(w) > 0, lambda w: average(f, w, x, n), lambda w: w + f.mean(x)[:3, :2], w
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


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        average,
        metrics_beside_deltas,
        elementwise_between,
        weights_from_the_map,
        several_maps_on_shared_inputs,
        two_stages,
        weights_of_a_later_stage,
        wanted_of_each,
        nothing_of_the_map,
        rounds_in_a_scan,
        elementwise_before,
        under_a_condition,
        behind_calls,
        gradient_inside,
        gradient_of_a_square_inside,
        constants_among_the_results,
        small_and_boolean_types,
    )
}


def federated(name, at_once=1, size=N):
    return fedpax.program(clients=size, clients_per_step=at_once)(
        functools.partial(PROGRAMS[name], Federated)
    )


@functools.cache
def expected(name):
    return jax.jit(functools.partial(PROGRAMS[name], Plain))(W, X, WEIGHTS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_every_mesh(name, current_mesh):
    close(federated(name)(W, X, WEIGHTS), expected(name))


@pytest.mark.parametrize("at_once", [None, "auto", 5, N])
@pytest.mark.parametrize("name", ["metrics_beside_deltas", "two_stages", "wanted_of_each"])
def test_chunks(name, at_once):
    close(federated(name, at_once)(W, X, WEIGHTS), expected(name))


SMOOTH = ["average", "weights_from_the_map", "two_stages", "wanted_of_each", "rounds_in_a_scan"]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name, current_mesh):
    def total(fn):
        return lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(*args)))

    gradient = lambda fn: jax.jit(jax.grad(total(fn), argnums=(0, 1, 2)))(W, X, WEIGHTS)
    close(gradient(federated(name)), gradient(functools.partial(PROGRAMS[name], Plain)), 1e-4)


def test_clients_inside_islands(current_mesh):
    x = normal(4, N, 3, seed=4)

    @fedpax.program(islands=4, clients=N, clients_per_step=1)
    def program(w, x):
        def island(w, x):
            moved = federated_map(
                lambda w, x: w * jnp.sin(x),
                federated_broadcast(w, placement="clients"),
                x,
                placement="clients",
            )
            return w + federated_mean(moved, placement="clients")

        moved = federated_map(
            island, federated_broadcast(w, placement="islands"), x, placement="islands"
        )
        return federated_mean(moved, placement="islands"), federated_max(moved, placement="islands")

    w = normal(3)
    moved = w + (w * np.sin(x)).mean(1)
    close(program(w, x), (moved.mean(0), moved.max(0)))
    gradient = jax.grad(lambda w: jnp.sum(program(w, x)[0] ** 2))(w)
    close(gradient, 2 * moved.mean(0) * (1 + np.sin(x).mean((0, 1))))
    text = fedpax.explain(program, w, x)
    assert text.count("nothing is stored") == 2


# ---- structure


def shapes_inside(jaxpr):
    """The shapes of all values that equations make, at any depth."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in inner_jaxprs(eqn):
            yield from shapes_inside(inner)


def streamed(fn, *args):
    """The streamed jaxprs of the programs that a function calls."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return [stream(e.params["jaxpr"]) for e in jaxpr.eqns if "placements" in e.params]


FLAT = [
    "average",
    "metrics_beside_deltas",
    "elementwise_between",
    "elementwise_before",
    "weights_from_the_map",
    "several_maps_on_shared_inputs",
    "rounds_in_a_scan",
    "under_a_condition",
    "behind_calls",
    "gradient_inside",
]


@pytest.mark.parametrize("name", FLAT)
def test_nothing_is_held_of_all_participants(name):
    (closed,) = streamed(federated(name), W, X, WEIGHTS)
    held = [s for s in shapes_inside(closed.jaxpr) if s[:1] == (N,)]
    assert not held, held


def test_the_same_sees_what_is_held_where_the_pass_does_not_run():
    jaxpr = jax.make_jaxpr(federated("average"))(W, X, WEIGHTS).jaxpr
    (closed,) = [e.params["jaxpr"] for e in jaxpr.eqns if "placements" in e.params]
    assert (N, 3, 2) in shapes_inside(closed.jaxpr)


def test_only_what_is_wanted_of_each_is_stored():
    (closed,) = streamed(federated("wanted_of_each"), W, X, WEIGHTS)
    held = {s for s in shapes_inside(closed.jaxpr) if s[:1] == (N,)}
    assert held == {(N,), (N, 1), (N, 3, 2)}  # norms, and the broadcast that is returned
    deltas = [s for s in shapes_inside(closed.jaxpr) if s == (N, 3, 2)]
    assert len(deltas) == 1


def test_a_later_stage_stores_what_it_reads_again():
    text = fedpax.explain(federated("two_stages"), W, X, WEIGHTS)
    assert re.search(r"stage 0: .* stored of each participant:\n +float32\[12,3,2\]: a later", text)
    assert re.search(r"stage 1: .* nothing is stored", text)


def temporary_bytes(fn, participants):
    x, n = normal(participants, 5, 32), np.ones(participants, np.float32)
    return jax.jit(fn).lower(normal(32, 16), x, n).compile().memory_analysis().temp_size_in_bytes


def gradient_through_a_round(participants):
    @fedpax.program(clients=participants, clients_per_step=1)
    def program(w, x, n):
        deltas = federated_map(jax.checkpoint(local), federated_broadcast(w), x)
        return w + federated_mean(deltas, n)

    return jax.grad(lambda w, x, n: jnp.sum(program(w, x, n) ** 2), argnums=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: federated("average", 1, size),
        lambda size: federated("metrics_beside_deltas", 4, size),
        lambda size: federated("gradient_inside", 1, size),
        gradient_through_a_round,
    ],
    ids=["average", "metrics", "gradient inside", "gradient outside"],
)
def test_memory_is_flat_in_the_number_of_participants(make):
    few, many = (temporary_bytes(make(size), size) for size in (64, 2048))
    assert few > 0
    assert many <= 1.05 * few


@pytest.mark.parametrize("name", ["average", "metrics_beside_deltas", "gradient_inside"])
def test_no_all_reduce_stands_in_the_loop(name):
    mesh = fedpax.make_mesh(clients=4, fsdp=2)
    with jax.set_mesh(mesh):
        compiled = jax.jit(federated(name)).lower(W, X, WEIGHTS).compile()
    found = [c for c in collectives(compiled.as_text(), mesh) if "clients" in c.axes]
    assert found and not any(c.in_loop for c in found)


# ---- words


def test_explain_says_who_needs_what_is_stored():
    text = fedpax.explain(federated("wanted_of_each"), W, X, WEIGHTS)
    assert "float32[12]: the program returns it" in text
    assert "float32[12]: the server reads it in 'reduce_sum'" in text


def test_explain_looks_into_the_gradient():
    gradient = jax.grad(lambda w: jnp.sum(federated("average")(w, X, WEIGHTS)))
    assert fedpax.explain(gradient, W).count("program ") >= 2


def test_explain_of_a_function_without_programs():
    assert fedpax.explain(jnp.sin, 1.0) == "There is no fedpax program in this function."


def test_a_map_that_only_prints_still_runs(capfd):
    @fedpax.program(clients=3, clients_per_step=1)
    def program(x):
        federated_map(lambda x: jax.debug.print("client {}", x), x)
        return federated_sum(x)

    assert program(jnp.arange(3)) == 3
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "2", "client", "client", "client"]
