"""Under transformations in any order, on any mesh, a program equals plain JAX."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal, place, positive
from jax.sharding import AxisType

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_max,
    federated_mean,
    federated_min,
    federated_sum,
)

N = 4


def local_work(w, copy, x):
    """Take a gradient step and compute a score; `w` is closed over, `copy` was broadcast."""
    gradient = jax.grad(lambda v: jnp.sum((v * x) ** 4))(copy)  # polynomials compile fast
    return copy - 0.1 * gradient, jnp.sum(w * x) ** 3


@fedpax.program(clients=N)
def federated(w, x, n):
    moved, score = federated_map(lambda *args: local_work(w, *args), federated_broadcast(w), x)
    mean = jnp.sum(federated_mean(moved, n) ** 2)
    return mean + federated_sum(score) + federated_max(score) - federated_min(score) * mean


def plain(w, x, n):
    copies = jnp.broadcast_to(w, (N, 2))
    moved, score = jax.vmap(functools.partial(local_work, w))(copies, x)
    mean = jnp.sum((jnp.tensordot(n, moved, 1) / jnp.sum(n)) ** 2)
    return mean + jnp.sum(score) + jnp.max(score) - jnp.min(score) * mean


# Each takes a function (w, x, n) -> scalar and returns another, so that they compose in any order.
# Tangents and cotangents depend on the arguments, so that a constant result is always wrong.


def tangents(w, x, n):
    return w * w, x * x + 0.1, n / 2


def scalar(tree):
    return sum(jnp.sum(leaf + leaf**2 / 8) for leaf in jax.tree.leaves(tree)) / 4


TRANSFORMATIONS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "grad": lambda f: lambda *a: scalar(jax.grad(f, argnums=(0, 1, 2))(*a)),
    "vjp": lambda f: lambda *a: scalar(jax.vjp(f, *a)[1](f(*a) + 1)),
    "jvp": lambda f: lambda *a: scalar(jax.jvp(f, a, tangents(*a))),
    "linearize": lambda f: lambda *a: scalar(jax.linearize(f, *a)[1](*tangents(*a))),
    "jacfwd": lambda f: lambda *a: scalar(jax.jacfwd(f, argnums=(0, 2))(*a)),
    "jacrev": lambda f: lambda *a: scalar(jax.jacrev(f, argnums=(0, 2))(*a)),
    "hessian": lambda f: lambda *a: scalar(jax.hessian(f)(*a)),
    "vmap": lambda f: (
        lambda w, x, n: scalar(
            jax.vmap(f, (0, None, 1))(jnp.stack([w, w * w]), x, jnp.stack([n, n + 1], axis=1))
        )
    ),
    "scan": lambda f: (  # the tangent keeps high derivatives of polynomials from overflowing
        lambda w, x, n: jax.lax.scan(
            lambda c, scale: (f(w + jnp.tanh(c), x * scale, n) / 4, None),
            0.0,
            jnp.array([1.0, 0.7]),
        )[0]
    ),
    "cond": lambda f: (
        lambda w, x, n: jax.lax.cond(jnp.sum(w) > 100, lambda *a: jnp.sum(a[0]), f, w, x, n)
    ),
}
COMPOSABLE = ["jit", "grad", "jvp", "vmap", "hessian", "remat", "scan", "cond"]


def arguments():
    return normal(2), normal(N, 2, seed=1), positive(N, seed=2)


def apply(names, f):
    for name in reversed(names):  # the first is the outermost, as in the name of the test
        f = TRANSFORMATIONS[name](f)
    return f


@functools.cache
def expected(names):
    return jax.jit(apply(names, plain))(*arguments())


def unsupported_by_jax(names) -> bool:
    """Return whether a conditional is batched on explicit axes, for which JAX has no rule."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return explicit and "cond" in names and "vmap" in names[: names.index("cond")]


@pytest.fixture
def agrees() -> Iterator:
    """Compare a chain of transformations with plain JAX; fail if a test compares nothing."""
    compared = []

    def check(*names: str) -> None:
        compared.append(names)
        want = expected(names)
        w, x, n = arguments()
        args = place(w, "fsdp"), place(x, "clients", "fsdp"), place(n, "clients")
        f = apply(names, federated)
        if unsupported_by_jax(names):
            with pytest.raises(Exception, match="select `which` must be"):
                jax.jit(f)(*args)
            return
        # Run eagerly, each primitive of a derivative is compiled and called by itself.
        result = f(*args) if names[0] == "eager" else jax.jit(f)(*args)
        assert np.isfinite(want)
        assert_close(result, want, 2e-4)

    yield check
    assert compared, "the test did not compare anything"


@pytest.mark.slow
def test_an_eager_gradient_without_a_mesh(agrees):
    agrees("eager", "grad")


def test_plain_jax_batches_no_condition_on_explicit_axes(explicit_mesh):
    branch = lambda w: jax.lax.cond(jnp.sum(w) > 0, jnp.sin, jnp.cos, w)
    with pytest.raises(Exception, match="select `which` must be"):
        jax.jit(jax.vmap(branch))(place(normal(3, 2), None, "fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation(name, agrees, current_mesh):
    agrees(name)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["vmap", "hessian"])
def test_a_transformation_on_a_mesh(name, agrees, mesh_only):
    agrees(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_eager_transformation(name, agrees, current_mesh):
    agrees("eager", name)


ORDERS = [
    ("grad", "scan", "vmap"),
    ("vmap", "grad", "remat"),
    ("jvp", "grad", "jvp"),
    ("hessian", "vmap"),
    ("scan", "cond", "jvp"),
    ("remat", "vmap", "vmap"),
]


@pytest.mark.parametrize(
    "names",
    # The first is run on meshes.
    [n if i == 4 else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(ORDERS)],
    ids=" of ".join,
)
def test_orders_without_a_mesh(names, agrees):
    agrees(*names)


@pytest.mark.slow
@pytest.mark.parametrize("names", ORDERS[:1], ids=" of ".join)
def test_orders_on_a_mesh(names, agrees, main_mesh):
    agrees(*names)


@pytest.mark.slow
@pytest.mark.parametrize("names", list(itertools.product(COMPOSABLE, repeat=2)), ids=" of ".join)
def test_all_orders_of_two(names, agrees, main_mesh):
    agrees(*names)


@pytest.mark.slow
@pytest.mark.parametrize("names", list(itertools.permutations(COMPOSABLE, 3)), ids=" of ".join)
def test_all_orders_of_three(names, agrees, explicit_mesh):
    agrees(*names)


# ---- cases that the chains above do not cover


def together(*fns):
    """Return a function that runs several functions in one compiled program."""
    return jax.jit(lambda *args: [fn(*args) for fn in fns])


@pytest.mark.slow
def test_third_derivatives(explicit_mesh):
    third = lambda f: jax.jit(jax.jacfwd(jax.jacrev(jax.grad(f))))
    args = arguments()
    assert_close(third(federated)(*args), third(plain)(*args), 1e-3)


def test_mixed_derivatives_in_values_and_weights():
    mixed = lambda f: jax.jacfwd(jax.grad(f, argnums=2), argnums=(0, 1, 2))
    assert_close(*together(mixed(federated), mixed(plain))(*arguments()), 1e-3)


def test_the_gradient_of_a_gradient_inside_the_program(main_mesh):
    # Meta-learning: the server differentiates a whole inner round with respect to its rate.
    @fedpax.program(clients=N)
    def meta(rate, w, x):
        total = lambda w: federated_mean(federated_map(lambda x: jnp.sum(jnp.sin(w * x)), x))
        return total(w - rate * jax.grad(total)(w))

    def plain_meta(rate, w, x):
        total = lambda w: jnp.mean(jnp.sum(jnp.sin(w * x), 1))
        return total(w - rate * jax.grad(total)(w))

    w, x, _ = arguments()
    derivative = lambda f: jax.value_and_grad(f, argnums=(0, 1, 2))
    assert_close(*together(derivative(meta), derivative(plain_meta))(0.3, w, x), 1e-4)


def test_derivatives_with_integer_and_key_arguments():
    def work(w, key, label, x):
        return jnp.sum(w[label] * x + jax.random.normal(key, (2,))), label + 1

    @fedpax.program(clients=N)
    def program(w, keys, labels, x):
        score, after = federated_map(functools.partial(work, w), keys, labels, x)
        return federated_mean(score**2), federated_sum(after)

    def plainly(w, keys, labels, x):
        score, after = jax.vmap(functools.partial(work, w))(keys, labels, x)
        return jnp.mean(score**2), jnp.sum(after)

    w, x = normal(3, 2), normal(N, 2)
    rest = jax.random.split(jax.random.key(1), N), np.array([0, 2, 1, 2]), x
    gradient = lambda f: jax.value_and_grad(f, argnums=(0, 3), has_aux=True)
    assert_close(*together(gradient(program), gradient(plainly))(w, *rest))


def test_a_derivative_with_respect_to_integers_is_empty():
    program = fedpax.program(clients=N)(
        lambda w, labels: federated_mean(federated_map(lambda label: w[label], labels))
    )
    labels = np.array([0, 2, 1, 2])
    by_value, by_label = jax.grad(program, argnums=(0, 1), allow_int=True)(normal(3), labels)
    assert_close(by_value, np.array([0.25, 0.25, 0.5], np.float32))
    assert by_label.dtype == jax.dtypes.float0
    tangent = np.zeros(N, jax.dtypes.float0)
    _, moved = jax.jvp(program, (normal(3), labels), (normal(3, seed=4), tangent))
    assert_close(moved, normal(3, seed=4)[labels].mean())


def test_an_unused_argument_and_an_unused_result():
    @fedpax.program(clients=N)
    def program(w, unused, x):
        used, ignored = federated_map(lambda x: (jnp.sin(w * x), jnp.exp(unused * x)), x)
        return federated_sum(used), federated_sum(ignored)

    w, x, _ = arguments()
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(program(*a)[0]), argnums=(0, 1)))(w, w, x)
    assert_close(gradients, ((np.cos(w * x) * x).sum(0), np.zeros(2, np.float32)))


def test_complex_derivatives():
    work = lambda w, x: jnp.sum(jnp.sin(w * x)) * w[0]

    @fedpax.program(clients=N)
    def program(w, x):
        return jnp.abs(federated_mean(federated_map(lambda x: work(w, x), x))) ** 2

    plainly = lambda w, x: jnp.abs(jnp.mean(jax.vmap(lambda x: work(w, x))(x))) ** 2
    w, x = normal(2) + 1j * normal(2, seed=5), normal(N, 2) + 1j * normal(N, 2, seed=6)
    gradient = lambda f: jax.grad(f, argnums=(0, 1))
    assert_close(*together(gradient(program), gradient(plainly))(w, x), 1e-4)
