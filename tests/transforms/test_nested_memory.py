"""Programs with nested placements equal nested `vmap`s, and read their arguments in place."""

import contextlib
import functools
import math

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from program_table import (
    close,
    normal,
    slow,
)

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_mean,
)


def nested(levels, chunk_size):
    """Return a program of nested means, over the participants of each level."""

    def inside(names, w, x):
        if not names:
            return w * jnp.mean(jnp.sin(x @ w))
        name, *others = names
        each = jax.checkpoint(functools.partial(inside, others))
        moved = federated_map(each, federated_broadcast(w, placement=name), x, placement=name)
        return w + federated_mean(moved, placement=name)

    names = list(levels)
    return fedpax.program(placements=levels, chunk_size=chunk_size)(
        functools.partial(inside, names)
    )


def nested_plainly(w, x):
    if x.ndim == 2:
        return w * jnp.mean(jnp.sin(x @ w))
    return w + jnp.mean(jax.vmap(nested_plainly, (None, 0))(w, x), 0)


def on_mesh(axes):
    if not axes:
        return contextlib.nullcontext()
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.set_mesh(fedpax.make_mesh(**axes, devices=devices))


LEVELS = [{"islands": 4, "clients": 6}, {"regions": 2, "islands": 4, "clients": 6}]


@pytest.mark.parametrize("levels", [slow(LEVELS[0]), LEVELS[1]], ids=len)
@pytest.mark.parametrize("chunk_size", [1, slow(3), slow("auto"), slow(None)])
@pytest.mark.parametrize(
    "axes", [{}, slow({"islands": 2}), slow({"clients": 2}), {"islands": 2, "clients": 3}]
)
def test_nested_placements_equal_nested_vmaps(levels, chunk_size, axes):
    w, x = normal(7), normal(*levels.values(), 5, 7)

    def value_and_gradient(fn):
        def total(w, x):
            value = fn(w, x)
            return jnp.sum(jnp.sin(value)), value

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))

    expected = value_and_gradient(nested_plainly)(w, x)
    with on_mesh(axes):
        gradient = value_and_gradient(nested(levels, chunk_size))(w, x)
    close(gradient, expected)


@pytest.mark.parametrize("levels", [slow(LEVELS[0]), LEVELS[1]], ids=len)
@pytest.mark.parametrize("chunk_size", [1, slow(2), slow("auto")])
@pytest.mark.parametrize("axes", [{}, slow({"islands": 2})])
def test_inner_loops_read_their_arguments_without_a_copy(levels, chunk_size, axes):
    def temporaries(clients, make):
        sizes = levels | {"clients": clients}
        args = normal(16), np.ones((*sizes.values(), 8, 16), np.float32)
        compiled = jax.jit(make(nested(sizes, chunk_size))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with on_mesh(axes):
        for make in (lambda fn: fn, lambda fn: jax.grad(lambda *args: jnp.sum(fn(*args) ** 2))):
            few, many = temporaries(12, make), temporaries(768, make)
            assert many <= 1.05 * few, (few, many)


@pytest.mark.parametrize("chunk_size", [1, slow(2), slow("auto")])
def test_nested_programs_read_their_arguments_without_a_copy(chunk_size):
    def make(clients):
        @fedpax.program(clients=clients, chunk_size=chunk_size)
        def of_island(w, x):
            each = jax.checkpoint(lambda w, x: w * jnp.mean(jnp.sin(x @ w)))
            return w + federated_mean(federated_map(each, federated_broadcast(w), x))

        @fedpax.program(islands=4, chunk_size=chunk_size)
        def program(w, x):
            return federated_mean(
                federated_map(jax.checkpoint(of_island), federated_broadcast(w), x)
            )

        return jax.value_and_grad(lambda w, x: jnp.sum(program(w, x) ** 2))

    def arguments(clients):
        return normal(7), normal(4, clients, 5, 7)

    def temporaries(clients):
        compiled = jax.jit(make(clients)).lower(*arguments(clients)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    w, x = arguments(6)
    plain = jax.jit(jax.value_and_grad(lambda w: jnp.sum((nested_plainly(w, x) - w) ** 2)))
    total, gradient = plain(w)
    close(make(6)(w, x), (total, gradient))
    assert temporaries(768) == temporaries(12)
