"""Every method that averages takes every aggregator."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from aggregators.every_aggregator import AGGREGATORS as EVERY_AGGREGATOR

from fedpax import Cohort
from fedpax.aggregators import (
    codecs,
    compressed_mean,
    geometric_median,
    krum,
    mean,
    private_secure_mean,
    quantized_mean,
    secure_mean,
)
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import (
    FedAcRates,
    agnostic,
    apfl,
    diloco,
    ditto,
    eager_diloco,
    easgd,
    fedac,
    fedavg,
    feddyn,
    fednova,
    fedprox,
    hypcluster,
    local_sgd,
    mime,
    mime_lite,
    muloco,
    per_fedavg,
    reptile,
    scaffold,
    self_tuning,
    server_adam,
    streaming_diloco,
)

N, POPULATION, STEPS = 8, 12, 4
SGD = optax.sgd(0.05)
CLIENTS = {"cohort_size": N, "client_optimizer": SGD}
STORED = CLIENTS | {"num_clients": POPULATION}
ISLANDS = {"islands": N, "inner_optimizer": SGD}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    return jnp.mean(error**2) / 2, {"bias": jnp.mean(error)}


METHODS: dict[str, Callable[..., FederatedAlgorithm]] = {
    "fedavg": lambda **a: fedavg(loss_fn, **CLIENTS, **a),
    "FedAdam": lambda **a: fedavg(loss_fn, server_optimizer=server_adam(0.1), **CLIENTS, **a),
    "self-tuning": lambda **a: self_tuning(
        lambda h: fedavg(
            loss_fn,
            server_optimizer=optax.sgd(h["rate"], momentum=1 - h["damping"]),
            **CLIENTS,
            **a,
        ),
        {"rate": 1.0, "damping": 0.1},
        loss_fn,
    ),
    "fedprox": lambda **a: fedprox(loss_fn, mu=0.1, **CLIENTS, **a),
    "scaffold I": lambda **a: scaffold(loss_fn, option="I", **STORED, **a),
    "scaffold II": lambda **a: scaffold(loss_fn, **STORED, **a),
    "mime": lambda **a: mime(loss_fn, **CLIENTS, **a),
    "mime_lite": lambda **a: mime_lite(loss_fn, **CLIENTS, **a),
    "fedac": lambda **a: fedac(loss_fn, cohort_size=N, rates=FedAcRates(0.05, 0.1, 2.0, 3.0), **a),
    "fednova": lambda **a: fednova(loss_fn, **CLIENTS, **a),
    "feddyn": lambda **a: feddyn(loss_fn, alpha=0.1, **STORED, **a),
    "agnostic": lambda **a: agnostic(loss_fn, mixture_learning_rate=0.1, **STORED, **a),
    "apfl": lambda **a: apfl(loss_fn, mixing=0.5, mixing_learning_rate=0.1, **STORED, **a),
    "ditto": lambda **a: ditto(loss_fn, lam=0.1, **STORED, **a),
    "hypcluster": lambda **a: hypcluster(loss_fn, num_clusters=2, **CLIENTS, **a),
    "per_fedavg": lambda **a: per_fedavg(loss_fn, adaptation_learning_rate=0.1, **CLIENTS, **a),
    "reptile": lambda **a: reptile(loss_fn, meta_learning_rate=0.1, **CLIENTS, **a),
    "local_sgd": lambda **a: local_sgd(loss_fn, islands=N, optimizer=SGD, **a),
    "diloco": lambda **a: diloco(loss_fn, **ISLANDS, **a),
    "muloco": lambda **a: muloco(loss_fn, islands=N, **a),
    "eager_diloco": lambda **a: eager_diloco(loss_fn, **ISLANDS, **a),
    "streaming_diloco": lambda **a: streaming_diloco(
        loss_fn, fragments=lambda path, leaf: leaf.ndim - 1, delay=1, **ISLANDS, **a
    ),
    "easgd": lambda **a: easgd(loss_fn, islands=N, optimizer=SGD, **a),
}

# `compressed_mean` has a row for each codec.
AGGREGATORS = EVERY_AGGREGATOR | {
    "secure_mean": secure_mean(max_value=1.0),
    "private_secure_mean": private_secure_mean(max_norm=1.0, noise_multiplier=0.5, seed=0),
    "uniform": compressed_mean(codecs.rotated(codecs.uniform(4))),
    "drive": compressed_mean(codecs.drive()),
    "terngrad": compressed_mean(codecs.terngrad()),
    "e3m0": compressed_mean(codecs.e3m0(), mean_codec=codecs.e3m0()),
    "sign": compressed_mean(codecs.sign(), error_feedback=True),
    "top_k": compressed_mean(codecs.top_k(0.1), error_feedback=True),
    "random_k": compressed_mean(codecs.random_k(0.1, unbiased=False), error_feedback=True),
    "krum": krum(2),
    "geometric_median": geometric_median(num_iterations=2),
}
del AGGREGATORS["compressed_mean"], AGGREGATORS["compressed_mean unbiased"]


# In float32 no type can widen. Each aggregator and each method keeps it in tests of its own.
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
@pytest.mark.parametrize(
    "name",
    [n if n == "fedavg" else pytest.param(n, marks=pytest.mark.slow) for n in METHODS],
)
def test_a_round_keeps_the_types_of_the_state(name: str, dtype: Any):
    """Abstractly; clients with unequal steps where the method has clients."""
    params = {"kernel": jnp.ones((5, 2), dtype), "bias": jnp.zeros(2, dtype)}
    if name == "hypcluster":
        params = jax.tree.map(lambda p: jnp.stack([p, -p]), params)
    shape = (N, STEPS, 4)
    batches = {"x": jnp.ones((*shape, 5), dtype), "y": jnp.ones((*shape, 2), dtype)}
    cohort = Cohort(batches)
    if name not in ("streaming_diloco", "eager_diloco"):
        cohort = Cohort(batches, np.arange(1, N + 1), np.arange(N) % (STEPS + 1), np.arange(N))
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    for combined, aggregator in AGGREGATORS.items():
        algorithm = METHODS[name](aggregator=aggregator)
        state = jax.eval_shape(algorithm.init, params)
        after, metrics = jax.eval_shape(algorithm.round, state, cohort)
        assert types(after) == types(state), combined
        assert all(metric.shape == () for metric in metrics.values()), combined


@pytest.mark.parametrize("name", METHODS)
def test_a_metric_of_the_loss_that_the_aggregator_reports_too_raises(name):
    plain = mean()

    def aggregate(*arguments):
        average, state, _ = plain.aggregate(*arguments)
        return average, state, {"bias": jnp.float32(0)}

    algorithm = METHODS[name](aggregator=plain._replace(aggregate=aggregate))
    params = {"kernel": jnp.ones((5, 2)), "bias": jnp.zeros(2)}
    if name == "hypcluster":
        params = jax.tree.map(lambda p: jnp.stack([p, -p]), params)
    shape = (N, STEPS, 4)
    batches = {"x": jnp.ones((*shape, 5)), "y": jnp.ones((*shape, 2))}
    fields = () if "diloco" in name else (np.arange(1, N + 1), None, np.arange(N))
    with pytest.raises(ValueError, match="loss_fn returned a metric called 'bias'"):
        jax.eval_shape(
            algorithm.round, jax.eval_shape(algorithm.init, params), Cohort(batches, *fields)
        )


@pytest.mark.parametrize(
    "aggregator",
    [mean(), quantized_mean(4), compressed_mean(codecs.top_k(1 / 4), error_feedback=True)],
    ids=["mean", "quantized_mean", "error_feedback"],
)
def test_clients_in_chunks_that_choose_their_weights_train_once(aggregator):
    def loss_fn(w, x):
        return jnp.sum(jnp.sin(w) * x), {}  # the gradient has one cosine

    algorithm = hypcluster(
        loss_fn,
        cohort_size=4,
        num_clusters=2,
        client_optimizer=SGD,
        aggregator=aggregator,
        chunk_size=1,
    )
    state = algorithm.init(jnp.ones((2, 8)))
    text = jax.jit(algorithm.round).lower(state, Cohort(jnp.ones((4, 2, 8)))).as_text()
    assert text.count("stablehlo.cosine") == 1
