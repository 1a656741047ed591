"""Settings and cohorts that the federated methods refuse, with the remedy's words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort
from fedpax.aggregators import clip_by_norm, coordinate_median
from fedpax.algorithms import (
    FedAcRates,
    agnostic,
    apfl,
    async_diloco,
    decoupled_diloco,
    diloco,
    ditto,
    eager_diloco,
    easgd,
    fedac,
    fedac_i,
    fedac_ii,
    fedavg,
    feddyn,
    fednova,
    fedprox,
    hypcluster,
    merge,
    mime_adam,
    noloco,
    per_fedavg,
    scaffold,
    streaming_diloco,
)

COMMON = {"cohort_size": 4, "client_optimizer": optax.sgd(0.1)}
STORED = COMMON | {"num_clients": 6}
START = jnp.arange(5.0)


def loss_fn(w: Any, x: Any) -> tuple[jax.Array, None]:
    return jnp.mean((x @ w) ** 2), None


def random_cohort(batch_size: int = 2) -> Cohort:
    x = np.random.default_rng(0).normal(size=(4, 3, batch_size, 5))
    return Cohort(x.astype(np.float32), client_ids=np.arange(4))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: fedprox(loss_fn, mu=-0.1, **COMMON),
            r"fedprox\(\): mu is -0.1, expected a finite number of at least 0. Pass 0.0 for fedavg",
        ),
        (lambda: fedprox(loss_fn, mu=float("nan"), **COMMON), "mu is nan"),
        (
            lambda: feddyn(loss_fn, alpha=-1.0, **STORED),
            r"feddyn\(\): alpha is -1.0, expected a finite number",
        ),
        (
            lambda: ditto(loss_fn, lam=-1.0, **STORED),
            r"ditto\(\): lam is -1.0, expected a finite number of at",
        ),
        (lambda: apfl(loss_fn, mixing=1.5, **STORED), "mixing is 1.5, expected a number from 0 to"),
        (
            lambda: mime_adam(0.0),
            r"mime_adam\(\): learning_rate is 0.0, expected a positive finite number",
        ),
        (
            lambda: mime_adam(0.1, b2=1.0),
            r"mime_adam\(\): b2 is 1.0, expected a number of at least 0 and below 1",
        ),
        (
            lambda: mime_adam(0.1, initial_second_moment=-1.0),
            "initial_second_moment is -1.0, expected a finite number of at least 0",
        ),
        (lambda: scaffold(loss_fn, option="III", **STORED), "option is 'III', expected \"I\" or"),
        (
            lambda: agnostic(loss_fn, mixture_learning_rate=-1.0, **STORED),
            "mixture_learning_rate is -1.0, expected",
        ),
        (
            lambda: agnostic(
                loss_fn, mixture_learning_rate=0.0, initial_mixture=np.ones(3), **STORED
            ),
            r"shape \[3\] .* expected nonnegative numbers \[6\], one per client of the population",
        ),
        (lambda: hypcluster(loss_fn, num_clusters=0, **COMMON), "num_clusters is 0, .* Pass 1 for"),
        (
            lambda: hypcluster(loss_fn, num_clusters=2, **COMMON).init(START),
            r"shape \[5\], expected \[2, ...\]: a model for each cluster. Make them with jax.vmap",
        ),
        (
            lambda: fedac(loss_fn, cohort_size=4, rates=FedAcRates(0.1, 0.1, 0.5, 1.0)),
            r"fedac\(\): alpha is 0.5, expected a finite number of at least 1",
        ),
        (lambda: fedac_i(0.1, strong_convexity=0.0, local_steps=3), "strong_convexity is 0.0, exp"),
        (
            lambda: fedac_ii(2.0, strong_convexity=1.0, local_steps=3),
            r"gamma \* strong_convexity is 2, expected below 1. Lower learning_rate or",
        ),
        (
            lambda: scaffold(loss_fn, **STORED | {"num_clients": 0}).init(START),
            "num_clients is 0, expected an int of at least 1. Pass the size of the population",
        ),
    ],
)
def test_settings_out_of_range_raise(build: Any, words: str):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    "algorithm",
    [
        scaffold(loss_fn, **STORED),
        feddyn(loss_fn, alpha=0.1, **STORED),
        ditto(loss_fn, lam=0.1, **STORED),
        apfl(loss_fn, mixing=0.1, **STORED),
        agnostic(loss_fn, mixture_learning_rate=0.1, **STORED),
    ],
)
def test_a_cohort_without_client_ids_raises(algorithm: Any):
    cohort = random_cohort()._replace(client_ids=None)
    with pytest.raises(ValueError, match=r"keeps state for each client. Set client_ids to each"):
        algorithm.round(algorithm.init(START), cohort)


def test_a_batch_of_one_example_raises():
    algorithm = per_fedavg(loss_fn, adaptation_learning_rate=0.1, **COMMON)
    cohort = random_cohort(batch_size=1)
    with pytest.raises(ValueError, match=r"expected at least two examples.* Use larger batches"):
        algorithm.round(algorithm.init(START), cohort)


@pytest.mark.parametrize(
    "build",
    [
        lambda **sizes: scaffold(loss_fn, client_optimizer=optax.sgd(0.1), **sizes),
        lambda **sizes: feddyn(loss_fn, alpha=0.1, client_optimizer=optax.sgd(0.1), **sizes),
        lambda **sizes: ditto(loss_fn, lam=0.1, client_optimizer=optax.sgd(0.1), **sizes),
        lambda **sizes: apfl(loss_fn, mixing=0.1, client_optimizer=optax.sgd(0.1), **sizes),
        lambda **sizes: agnostic(
            loss_fn, mixture_learning_rate=0.1, client_optimizer=optax.sgd(0.1), **sizes
        ),
    ],
)
def test_a_cohort_larger_than_the_population_raises(build: Any):
    build(cohort_size=4, num_clients=np.int64(4))
    with pytest.raises(ValueError, match=r"cohort_size is 4, expected at most .* 3. Reduce cohort"):
        build(cohort_size=4, num_clients=3)


@pytest.mark.parametrize(
    ("mu", "error", "words"),
    [
        (
            None,
            TypeError,
            "mu is None, expected a finite number of at least 0. Pass 0.0 for fedavg",
        ),
        ("0.1", TypeError, "mu is '0.1', expected a finite number"),
        (np.ones(2), TypeError, "mu is a ndarray, expected a finite number"),
        (float("inf"), ValueError, "mu is inf, expected a finite number of at least 0"),
    ],
)
def test_a_setting_that_is_no_number_raises(mu: Any, error: type[Exception], words: str):
    for number in (1, np.float32(0.1), np.int64(1), jnp.float32(0.1), jnp.bfloat16(0.5)):
        fedprox(loss_fn, mu=number, **COMMON)
    with pytest.raises(error, match=words):
        fedprox(loss_fn, mu=mu, **COMMON)


@pytest.mark.parametrize("aggregator", [clip_by_norm(1.0), coordinate_median])
@pytest.mark.parametrize(
    "build",
    [
        lambda **settings: fedavg(loss_fn, **COMMON, **settings),
        lambda **settings: fedac(
            loss_fn, cohort_size=4, rates=FedAcRates(0.1, 0.1, 1.0, 1.0), **settings
        ),
        lambda **settings: diloco(loss_fn, islands=2, inner_optimizer=optax.sgd(0.1), **settings),
        lambda **settings: async_diloco(
            loss_fn, islands=2, inner_optimizer=optax.sgd(0.1), **settings
        ),
        lambda **settings: decoupled_diloco(
            loss_fn, islands=2, inner_optimizer=optax.sgd(0.1), **settings
        ),
        lambda **settings: easgd(loss_fn, islands=2, optimizer=optax.sgd(0.1), **settings),
        lambda **settings: eager_diloco(
            loss_fn, islands=2, inner_optimizer=optax.sgd(0.1), **settings
        ),
        lambda **settings: streaming_diloco(
            loss_fn, islands=2, inner_optimizer=optax.sgd(0.1), fragments=1, **settings
        ),
    ],
)
def test_an_aggregator_that_is_a_function_raises(build: Any, aggregator: Any):
    with pytest.raises(TypeError, match=r"the function .* End .* chain\(clip_by_norm\(1.0\), mean"):
        build(aggregator=aggregator)


def test_fednova_raises_for_rules_by_parameter():
    rules = optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a"})
    with pytest.raises(ValueError, match=r"does not take a scalar parameter.* or use fedavg"):
        fednova(loss_fn, cohort_size=4, client_optimizer=rules)


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [np.nan, 1], [np.inf, 1]])
def test_weights_that_cannot_merge_models_raise(weights: Any):
    with pytest.raises(ValueError, match=r"expected nonnegative numbers, not all 0. Leave w"):
        merge(jnp.ones((2, 3)), weights)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": -1}, "learning_rate is -1, .* Pass 0.7, as the paper"),
        ({"momentum": 5}, "momentum is 5, expected a number from 0 to 1. Pass 0.5"),
        ({"pull": float("nan")}, "pull is nan"),
    ],
)
def test_nolocos_settings_out_of_range_raise(settings: Any, words: str):
    with pytest.raises(ValueError, match=words):
        noloco(loss_fn, islands=2, inner_optimizer=optax.sgd(0.1), **settings)


@pytest.mark.parametrize(
    "build",
    [
        lambda: scaffold(loss_fn, **STORED),
        lambda: feddyn(loss_fn, alpha=0.1, **STORED),
        lambda: ditto(loss_fn, lam=0.1, **STORED),
        lambda: apfl(loss_fn, mixing=0.5, **STORED),
        lambda: agnostic(loss_fn, mixture_learning_rate=0.1, **STORED),
    ],
)
@pytest.mark.parametrize("as_array", [np.array, jnp.array])
def test_a_client_that_is_twice_in_a_cohort_raises(build, as_array):
    algorithm = build()
    twice = random_cohort()._replace(client_ids=as_array([2, -1, 2, -1]))
    words = r"client_ids has the client 2 more than once.*Draw clients without replacement"
    with pytest.raises(ValueError, match=words):
        algorithm.round(algorithm.init(START), twice)
