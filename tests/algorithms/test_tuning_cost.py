"""The cost of gradients in hyperparameters and weights: memory flat in the clients, few FLOPs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tuning_problem import FEATURES, fedavg_of, loss_fn, random_cohort

import fedpax
from fedpax.algorithms import fedavg, fednova, fedprox, mime_lite, self_tuning


def temporaries(fn, *args) -> int:
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("names", "ragged", "bytes_per_client"),
    [
        pytest.param(("rate", "damping"), True, 0, marks=pytest.mark.slow),
        (("rate", "client_rate"), True, 8),  # two numbers; a model has 24 bytes
        pytest.param(("rate", "client_rate"), False, 0, marks=pytest.mark.slow),
    ],
)
def test_memory_is_flat_in_the_number_of_clients(names, ragged: bool, bytes_per_client: int):
    start = {"rate": 1.0, "damping": 0.5, "client_rate": 0.02}

    def of(clients: int) -> int:
        algorithm = self_tuning(
            lambda h: fedavg_of({"damping": 1.0} | h, clients),
            {name: start[name] for name in names},
            loss_fn,
            chunk_size=1,
        )
        state = jax.eval_shape(algorithm.init, jnp.zeros(FEATURES))
        return temporaries(algorithm.round, state, random_cohort(clients, ragged=ragged))

    assert of(512) - of(64) <= (512 - 64) * bytes_per_client


WEIGHTED = {
    "fedavg": fedavg,
    "fedprox": functools.partial(fedprox, mu=0.1),
    "fednova": fednova,
    "mime_lite": mime_lite,
}


@pytest.mark.parametrize(
    "name",
    [n if n == "fedavg" else pytest.param(n, marks=pytest.mark.slow) for n in WEIGHTED],
)
def test_the_gradient_in_the_clients_weights_stores_no_client(name: str):
    """With a chunk size: the same gradient, in memory that does not grow with the clients."""

    def gradient(clients: int, chunk_size):
        algorithm = WEIGHTED[name](
            loss_fn,
            cohort_size=clients,
            client_optimizer=optax.sgd(0.02),
            chunk_size=chunk_size,
        )

        def after(weights, cohort):
            state = algorithm.init(jnp.ones(FEATURES))
            state, _ = algorithm.round(state, cohort._replace(num_examples=weights))
            return jnp.sum(state.params**2)

        return jax.grad(after)

    def weighted(clients: int):
        return np.arange(1.0, clients + 1, dtype=np.float32), random_cohort(clients, ragged=True)

    gradients, stored = (jax.jit(gradient(6, size))(*weighted(6)) for size in (1, None))
    assert np.abs(stored).min() > 1e-4
    np.testing.assert_allclose(gradients, stored, rtol=1e-4, atol=1e-5)
    few, many = (temporaries(gradient(n, 1), *weighted(n)) for n in (64, 512))
    assert many - few <= (512 - 64) * 8  # two numbers; a model has 24 bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTED)
def test_a_hyperparameter_of_the_clients_stores_no_client(name: str):
    def of(clients: int) -> int:
        algorithm = self_tuning(
            lambda h: WEIGHTED[name](
                loss_fn,
                cohort_size=clients,
                client_optimizer=optax.sgd(h["rate"]),
                chunk_size=1,
            ),
            {"rate": 0.02},
            loss_fn,
            chunk_size=1,
        )
        state = jax.eval_shape(algorithm.init, jnp.zeros(FEATURES))
        return temporaries(algorithm.round, state, random_cohort(clients, ragged=True))

    assert of(512) - of(64) <= (512 - 64) * 16  # four numbers; a model has 24 bytes


def test_a_hyperparameter_of_the_server_costs_one_more_gradient():
    cohort = random_cohort()
    plain = fedavg_of({"rate": 1.0, "damping": 1.0})
    tuned = self_tuning(fedavg_of, {"rate": 1.0, "damping": 1.0}, loss_fn)
    params = jnp.zeros(FEATURES)
    flops = [
        fedpax.cost(a.round, a.init(params), cohort).placements["clients"].flops
        for a in (plain, tuned)
    ]
    assert flops[1] < (1 + 1.2 / 3) * flops[0]  # three local steps
