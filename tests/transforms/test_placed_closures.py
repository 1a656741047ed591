"""A mapped function that closes over a placed value is named, once, and in `explain`."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fedpax
from fedpax.transforms import PlacedClosureWarning

N = 4
DATA, INDEX = {"x": jnp.arange(N * 3.0).reshape(N, 3)}, jnp.arange(N)


def argument(data: Any, index: jax.Array) -> jax.Array:
    total = fedpax.federated_sum(data["x"])

    def peek(i: jax.Array) -> jax.Array:
        return data["x"][i].sum()

    return fedpax.federated_sum(fedpax.federated_map(peek, index)) + total.sum()


def rows(data: Any, index: jax.Array) -> jax.Array:
    first = 2 * data["x"][:, 0]  # of each client, and no operation has taken data["x"] itself
    return fedpax.federated_sum(fedpax.federated_map(lambda i: data["x"].sum() + i, first))


def result(data: Any, index: jax.Array) -> jax.Array:
    means = fedpax.federated_map(jnp.mean, data["x"])
    return fedpax.federated_sum(fedpax.federated_map(lambda i: means.sum() + i, index))


def elementwise(data: Any, index: jax.Array) -> jax.Array:
    means = 2 * fedpax.federated_map(jnp.mean, data["x"]) + 1
    return fedpax.federated_sum(fedpax.federated_map(lambda i: means[i], index))


def in_a_loop(data: Any, index: jax.Array) -> jax.Array:
    def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
        means = fedpax.federated_map(jnp.mean, data["x"])
        read = fedpax.federated_map(lambda i: means.sum() + i, index)
        return total + fedpax.federated_sum(read), None

    return jax.lax.scan(body, 0.0, length=2)[0]


def jitted_inside(data: Any, index: jax.Array) -> jax.Array:
    return jax.jit(result)(data, index)


def told(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(warning.category is PlacedClosureWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (argument, "peek() closes over data['x'], float32[4,3], the values of all clients"),
        (rows, "<lambda>() closes over data['x'], float32[4,3], the values of all clients"),
        (result, "<lambda>() closes over mean, float32[4], the values of all clients"),
        (elementwise, "<lambda>() closes over a value computed from mean, float32[4]"),
        (in_a_loop, "<lambda>() closes over mean, float32[4]"),
        (jitted_inside, "<lambda>() closes over mean, float32[4]"),
    ],
)
def test_a_closure_over_a_placed_value_is_told_once(fn, sentence):
    program = fedpax.program(clients=N)(fn)
    jitted = jax.jit(program)
    actual = told(lambda: [program(DATA, INDEX), program(DATA, INDEX), jitted(DATA, INDEX)])
    assert len(actual) == 1
    assert actual[0].startswith(f"program {fn.__name__}: {sentence}")
    assert actual[0].endswith("pass federated_broadcast(value) if every participant is to read it.")
    assert f"  {sentence}" in fedpax.explain(program, DATA, INDEX)


def server_value(data: Any, bias: jax.Array) -> jax.Array:
    """The bias has as many entries as there are clients, and is no client's."""
    return fedpax.federated_sum(fedpax.federated_map(lambda x: (x.sum() * bias).sum(), data["x"]))


def reduced(data: Any, index: jax.Array) -> jax.Array:
    total = fedpax.federated_sum(fedpax.federated_map(lambda x: jnp.ones(N), index))
    return fedpax.federated_sum(fedpax.federated_map(lambda x: x.sum() * total, data["x"]))


def broadcast(data: Any, index: jax.Array) -> jax.Array:
    everything = fedpax.federated_broadcast(data["x"])
    read = fedpax.federated_map(lambda x, all_x: x.sum() + all_x.sum(), data["x"], everything)
    return fedpax.federated_sum(read)


@pytest.mark.parametrize("fn", [server_value, reduced, broadcast])
def test_a_server_value_and_an_explicit_broadcast_are_not(fn):
    program = fedpax.program(clients=N)(fn)
    assert not told(lambda: jax.jit(program)(DATA, INDEX))
    assert "closes over" not in fedpax.explain(program, DATA, INDEX)
