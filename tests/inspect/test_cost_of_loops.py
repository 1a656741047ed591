"""`fedpax.cost` of loops and conditionals: executions, and what no count can know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax import federated_map, federated_mean
from fedpax.aggregators import private_secure_mean, secure_mean

N = 8
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)


def cost(fn, *args):
    return fedpax.cost(fedpax.program(clients=N)(fn), *args)


def test_loops_and_conditionals_count_as_often_as_they_run():
    def round_of(w, x):
        return w + federated_mean(federated_map(lambda x: jnp.outer(x, x @ w), x))

    def program(w, x):
        scanned = jax.lax.scan(lambda w, _: (round_of(w, x), None), w, length=3)[0]
        return jax.lax.cond(w[0, 0] > 0, lambda: round_of(scanned, x), lambda: scanned)

    result = cost(program, W, X)
    clients = result.placements["clients"]
    assert clients.broadcast_bytes == clients.sent_bytes == (3 + 1) * 60
    assert clients.flops == (3 + 1) * (2 * 15 + 15)
    assert result.flops_are_exact

    def until(w, x):
        return jax.lax.while_loop(lambda w: w[0, 0] < 3, lambda w: round_of(w, x), w)

    result = cost(until, W, X)
    assert result.placements["clients"].sent_bytes == 60
    assert not result.flops_are_exact and "loops of unknown length count once" in str(result)


def combined(aggregator):
    return lambda updates: aggregator.aggregate(aggregator.init(X[0]), updates, None)[0]


def repeated(body):
    """Return `body` in a loop whose length is known at run time alone."""
    return lambda x: jax.lax.fori_loop(0, jnp.int32(x[0, 0]), lambda _, i: body(i, x), 0)


def gathered(i, x):
    return i + jnp.sum(jnp.int32(x[:, 0]))


def received(i, x):
    federated_map(lambda x: jax.debug.callback(lambda *_: None, x, i), x)
    return i + 1


@pytest.mark.parametrize(
    ("fn", "exact"),
    [
        (combined(secure_mean(max_value=1.0, seed=0)), True),
        pytest.param(
            combined(private_secure_mean(max_norm=1.0, noise_multiplier=1.0, seed=0)),
            True,
            marks=pytest.mark.slow,
        ),
        (lambda x: jnp.sum(federated_map(jnp.tanh, x)) + repeated(lambda i, x: i + 1)(x), True),
        (lambda x: (federated_mean(x), repeated(gathered)(federated_map(jnp.tanh, x))), False),
        (repeated(received), False),
    ],
    ids=["secure_mean", "private_secure_mean", "counter", "sum_of_integers", "broadcast"],
)
def test_loops_of_unknown_length_that_count_nothing_are_exact(fn, exact):
    result = cost(fn, X)
    assert result.flops_are_exact == exact
    assert ("loops of unknown length" in str(result)) != exact
