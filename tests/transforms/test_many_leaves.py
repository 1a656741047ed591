"""The time to trace and lower a round is linear in the number of leaves of the model."""

import sys

import jax
import jax.numpy as jnp
import pytest

import fedpax
from fedpax.primitives.jaxpr_analysis import all_eqns
from fedpax.transforms.streaming import stream


def count_calls(fn):
    """Count the function calls of Python while `fn` runs: a time without noise."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return calls


def lower_round(leaves, weights):
    @fedpax.program(clients=2, chunk_size=1)
    def fedavg_round(params, x, num_examples):
        train = lambda p, x: jax.tree.map(lambda w: w * x, p)
        updates = fedpax.federated_map(train, fedpax.federated_broadcast(params), x)
        return fedpax.federated_mean(updates, weights=num_examples if weights else None)

    params = {f"layer{i}": jnp.ones(2) for i in range(leaves)}
    return jax.jit(fedavg_round).lower(params, jnp.ones((2, 2)), jnp.ones(2))


@pytest.mark.parametrize("weights", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lowering_is_linear_in_leaves(weights):
    lower_round(2, weights)  # what the first lowering caches
    few = count_calls(lambda: lower_round(50, weights))
    many = count_calls(lambda: lower_round(200, weights))
    assert many < 4.4 * few


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_the_means_of_all_leaves_share_the_sum_of_their_weights(dtype):
    @fedpax.program(clients=4, chunk_size=1)
    def average(params, x, num_examples):
        scaled = fedpax.federated_map(lambda x: jax.tree.map(lambda w: w * x, params), x)
        return fedpax.federated_mean(scaled, weights=num_examples)

    params = {f"layer{i}": jnp.full((2, 3), float(i)) for i in range(5)}
    x, weights = jnp.array([1.0, 2.0, 3.0, jnp.nan]), jnp.array([1, 2, 1, 0], dtype)
    streamed = stream(jax.make_jaxpr(average)(params, x, weights))
    (loop,) = (eqn for eqn in all_eqns(streamed.jaxpr) if eqn.primitive.name == "scan")
    floats = [v.aval for v in loop.outvars if v.aval.dtype == jnp.float32]
    assert sorted(aval.shape for aval in floats) == [(), *[(2, 3)] * 5]
    for i, mean in enumerate(average(params, x, weights).values()):
        assert jnp.array_equal(mean, jnp.full((2, 3), 2.0 * i))
