"""Participants' states that are donated are updated in place."""

import jax
import jax.experimental
import jax.numpy as jnp
import pytest
from program_table import (
    N,
    close,
    normal,
)

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_mean,
)


def stateful(participants, chunk_size):
    """Return a program with two states of one type, and data of the same type."""

    def client(state, x, w):
        first = jnp.tanh(state["first"] * w + x)
        return {"first": first, "second": state["second"] + first * x}, jnp.sum(first)

    @fedpax.program(clients=participants, chunk_size=chunk_size)
    def program(states, x, w):
        states, sums = federated_map(client, states, x, federated_broadcast(w))
        return states, federated_mean(sums)

    def plain(states, x, w):
        states, sums = jax.vmap(client, (0, 0, None))(states, x, w)
        return states, jnp.mean(sums)

    return program, plain


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_size", [1, 5, N])
def test_donated_states_are_updated_in_place(chunk_size, current_mesh):
    program, plain = stateful(N, chunk_size)
    states = {"first": normal(N, 8), "second": normal(N, 8, seed=1)}
    x, w = normal(N, 8, seed=2), normal(8)
    close(jax.jit(program)(states, x, w), plain(states, x, w))
    layout = jax.sharding.NamedSharding(current_mesh, jax.P("clients")) if current_mesh else None
    donated = jax.device_put(states, layout)
    expected = plain(states, x, w)
    close(jax.jit(program, donate_argnums=0)(donated, x, w), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))


@pytest.mark.parametrize("chunk_size", [1, 7])
def test_donated_states_have_no_second_buffer(chunk_size):
    def temporaries(size):
        states = {"first": normal(size, 256), "second": normal(size, 256)}
        step = jax.jit(stateful(size, chunk_size)[0], donate_argnums=0)
        compiled = step.lower(states, normal(size, 256), normal(256)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # 4 clients remain after the last chunk of 7, in both cases: their new states are temporaries.
    assert temporaries(2048) == temporaries(60)


def test_a_state_replaces_the_argument_that_it_depends_on():
    """The first argument has the same type, but another result is computed from it."""

    @fedpax.program(clients=64, chunk_size=1)
    def program(x, states):
        return federated_map(jnp.sin, states), federated_map(jnp.linalg.norm, x)

    x, states = normal(64, 256), normal(64, 256, seed=1)
    step = jax.jit(program, donate_argnums=1)
    assert step.lower(x, states).compile().memory_analysis().temp_size_in_bytes < x.nbytes
    donated = jax.device_put(states)
    close(step(x, donated), (jnp.sin(states), jnp.linalg.norm(x, axis=1)))
    assert donated.is_deleted()
