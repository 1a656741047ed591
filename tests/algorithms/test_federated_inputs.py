"""Settings and cohorts that the federated methods refuse, with the remedy's words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort
from fedpax.algorithms import (
    FedAcRates,
    agnostic,
    apfl,
    ditto,
    fedac,
    fedac_i,
    fedac_ii,
    feddyn,
    fedprox,
    hypcluster,
    mime_adam,
    per_fedavg,
    scaffold,
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
        (lambda: fedprox(loss_fn, mu=-0.1, **COMMON), "fedprox: mu is -0.1, expected a number of"),
        (lambda: fedprox(loss_fn, mu=float("nan"), **COMMON), "mu is nan"),
        (lambda: feddyn(loss_fn, alpha=-1.0, **STORED), "feddyn: alpha is -1.0, expected a number"),
        (lambda: ditto(loss_fn, lam=-1.0, **STORED), "ditto: lam is -1.0, expected a number of at"),
        (lambda: apfl(loss_fn, mixing=1.5, **STORED), "mixing is 1.5, expected a number from 0 to"),
        (lambda: mime_adam(0.0), "mime_adam: learning_rate is 0.0, expected a positive number"),
        (lambda: mime_adam(0.1, b2=1.0), "mime_adam: b2 is 1.0, expected at least 0 and below 1"),
        (
            lambda: mime_adam(0.1, initial_second_moment=-1.0),
            "initial_second_moment is -1.0, expected a number of at least 0",
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
        (lambda: hypcluster(loss_fn, num_clusters=0, **COMMON), "num_clusters is 0, expected at"),
        (
            lambda: hypcluster(loss_fn, num_clusters=2, **COMMON).init(START),
            r"shape \[5\], expected \[2, ...\]: a model for each cluster. Make them with jax.vmap",
        ),
        (
            lambda: fedac(loss_fn, cohort_size=4, rates=FedAcRates(0.1, 0.1, 0.5, 1.0)),
            "fedac: alpha is 0.5, expected a number of at least 1",
        ),
        (lambda: fedac_i(0.1, strong_convexity=0.0, local_steps=3), "strong_convexity is 0.0, exp"),
        (
            lambda: fedac_ii(2.0, strong_convexity=1.0, local_steps=3),
            r"gamma \* strong_convexity is 2, expected below 1. Lower learning_rate or",
        ),
        (
            lambda: scaffold(loss_fn, **STORED | {"num_clients": 0}).init(START),
            "num_clients is 0, expected at least 1",
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
