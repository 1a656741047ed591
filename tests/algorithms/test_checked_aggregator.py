"""An aggregator of one's own that breaks the contract raises when a round is traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from fedpax import Cohort, federated_map, federated_mean
from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import (
    async_diloco,
    decoupled_diloco,
    diloco,
    eager_diloco,
    fedac,
    fedac_i,
    fedavg,
    hypcluster,
    streaming_diloco,
)

N, FEATURES = 4, 3
CLIENTS = {"cohort_size": N, "client_optimizer": optax.sgd(0.1)}
ISLANDS = {"islands": N, "inner_optimizer": optax.sgd(0.1)}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, None]:
    return jnp.mean((batch @ params["w"]) ** 2), None


def trace(algorithm: FederatedAlgorithm, params: Any, cohort: Cohort) -> Any:
    return jax.eval_shape(algorithm.round, jax.eval_shape(algorithm.init, params), cohort)


def own(aggregate: Callable) -> Aggregator:
    return Aggregator(lambda params: (), aggregate)


BROKEN = {
    "two values": (
        lambda state, updates, weights: (federated_mean(updates, weights), state),
        TypeError,
        r"a tuple of 2, expected \(aggregated, state, metrics\). Return \{\} as metrics",
    ),
    "one value": (
        lambda state, updates, weights: federated_mean(updates, weights),
        TypeError,
        r"a dict, expected \(aggregated, state, metrics\)",
    ),
    "not reduced": (
        lambda state, updates, weights: (updates, state, {}),
        ValueError,
        r"of shape \[4, 3\] at \['w'\], expected \[3\]: .* Reduce the updates, as in fedpax.feder",
    ),
    "another structure": (
        lambda state, updates, weights: (federated_mean(updates, weights)["w"], state, {}),
        TypeError,
        r"structure PyTreeDef\(\*\), expected .* Return one array for each array of the updates",
    ),
    "no dict": (
        lambda state, updates, weights: (federated_mean(updates, weights), state, None),
        TypeError,
        r"a NoneType as metrics, expected a dict of scalars. Return \{\} if",
    ),
    "placed metric": (
        lambda state, updates, weights: (
            federated_mean(updates, weights),
            state,
            {"norm": federated_map(optax.tree.norm, updates)},
        ),
        TypeError,
        r"metric 'norm' of an array float32\[4\], expected a scalar. Reduce it, as in",
    ),
    "loss": (
        lambda state, updates, weights: (
            federated_mean(updates, weights),
            state,
            {"loss": jnp.float32(0)},
        ),
        ValueError,
        "a metric called 'loss', the name of the training loss. Rename it",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_result_that_breaks_the_contract_raises(name: str):
    aggregate, error, words = BROKEN[name]
    algorithm = fedavg(loss_fn, aggregator=own(aggregate), **CLIENTS)
    with pytest.raises(error, match=f"aggregator.aggregate returned .*{words}"):
        trace(algorithm, {"w": jnp.zeros(FEATURES)}, Cohort(jnp.ones((N, 2, 5, FEATURES))))


METHODS = {
    "FedAc": lambda **a: fedac(
        loss_fn, cohort_size=N, rates=fedac_i(0.1, strong_convexity=1.0, local_steps=2), **a
    ),
    "HypCluster": lambda **a: hypcluster(loss_fn, num_clusters=1, **CLIENTS, **a),
    "asynchronous DiLoCo": lambda **a: async_diloco(loss_fn, **ISLANDS, **a),
    "Decoupled DiLoCo": lambda **a: decoupled_diloco(loss_fn, **ISLANDS, **a),
    "DiLoCo": lambda **a: diloco(loss_fn, **ISLANDS, **a),
    "eager DiLoCo": lambda **a: eager_diloco(loss_fn, **ISLANDS, **a),
    "Streaming DiLoCo": lambda **a: streaming_diloco(
        loss_fn, fragments=lambda path, leaf: 0, **ISLANDS, **a
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_way_of_aggregating_is_checked(name: str):
    """One method for each place that calls an aggregator."""
    aggregate, error, words = BROKEN["two values"]
    params = {"w": jnp.zeros((1, FEATURES) if name == "HypCluster" else FEATURES)}
    with pytest.raises(error, match=words):
        algorithm = METHODS[name](aggregator=own(aggregate))
        trace(algorithm, params, Cohort(jnp.ones((N, 2, 5, FEATURES))))
