"""With `chunk_size`, a derivative of a round stores nothing for each client, in any method."""

import functools
from collections.abc import Callable
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
    fedavg,
    fedbuff,
    feddyn,
    fednova,
    fedprox,
    fine_tuning_evaluation,
    hypcluster,
    mime,
    mime_adam,
    mime_lite,
    per_fedavg,
    reptile,
    scaffold,
)

FEATURES, STEPS, BATCH = 24, 3, 4


def loss_fn(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict]:
    return jnp.mean(jnp.tanh(x @ w) ** 2), {}


def of_clients(algorithm: Callable, **settings: Any) -> Callable:
    return lambda clients, chunk_size: algorithm(
        loss_fn,
        cohort_size=clients,
        client_optimizer=optax.sgd(0.2, momentum=0.5),
        chunk_size=chunk_size,
        **settings,
    )


def of_population(algorithm: Callable, **settings: Any) -> Callable:
    return lambda clients, chunk_size: of_clients(algorithm, num_clients=clients, **settings)(
        clients, chunk_size
    )


METHODS = {
    "FedAvg": of_clients(fedavg),
    "FedProx": of_clients(fedprox, mu=0.7),
    "SCAFFOLD I": of_population(scaffold, option="I"),
    "SCAFFOLD": of_population(scaffold),
    "FedNova": of_clients(fednova),
    "FedDyn": of_population(feddyn, alpha=0.3),
    "Mime": of_clients(mime),
    "MimeLite": of_clients(mime_lite),
    "MimeAdam": lambda clients, chunk_size: mime(
        loss_fn, cohort_size=clients, client_optimizer=mime_adam(0.2), chunk_size=chunk_size
    ),
    "FedAc": lambda clients, chunk_size: fedac(
        loss_fn,
        cohort_size=clients,
        rates=FedAcRates(0.2, 0.4, 2.5, 3.5),
        chunk_size=chunk_size,
    ),
    "FedBuff": lambda clients, chunk_size: fedbuff(
        loss_fn,
        buffer_size=clients,
        client_optimizer=optax.sgd(0.2),
        max_staleness=1,
        chunk_size=chunk_size,
    ),
    "agnostic": of_population(agnostic, mixture_learning_rate=0.1),
    "APFL": of_population(apfl, mixing=0.4, mixing_learning_rate=0.5),
    "Ditto": of_population(ditto, lam=0.3),
    "HypCluster": of_clients(hypcluster, num_clusters=2),
    "Per-FedAvg": of_clients(per_fedavg, adaptation_learning_rate=0.3),
    "Reptile": of_clients(reptile, meta_learning_rate=0.4),
}
OFTEN = ("SCAFFOLD",)


def params_of(name: str) -> jax.Array:
    w = np.random.default_rng(1).normal(size=(2, FEATURES, FEATURES)).astype(np.float32) / 5
    return jnp.asarray(w if name == "HypCluster" else w[0])


def gradient_of(name: str, clients: int, chunk_size: int | None) -> tuple[Callable, tuple]:
    """Return the gradient of the loss after a round, and its arguments."""
    algorithm = METHODS[name](clients, chunk_size)
    x = np.random.default_rng(0).normal(size=(clients, STEPS, BATCH, FEATURES))
    params = params_of(name)
    state = algorithm.init(params)
    ids = None if name == "FedBuff" else jnp.arange(clients)

    def loss_after(params, state, batches):
        cohort = Cohort(batches, client_ids=ids)
        state, metrics = algorithm.round(state._replace(params=params), cohort)
        return jnp.sum(state.params**2) + metrics["loss"]

    return jax.grad(loss_after), (params, state, jnp.asarray(x, jnp.float32))


@functools.cache
def compiled(name: str, clients: int, chunk_size: int | None) -> tuple[jax.stages.Compiled, tuple]:
    fn, args = gradient_of(name, clients, chunk_size)
    return jax.jit(fn).lower(*args).compile(), args


def temporary_bytes(name: str, clients: int, chunk_size: int | None) -> int:
    return compiled(name, clients, chunk_size)[0].memory_analysis().temp_size_in_bytes


every_method = pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in METHODS]
)


@every_method
def test_memory_does_not_grow_with_the_clients(name: str):
    """Nothing of the size of a model or of a step's batch is added per client."""
    few, many = 8, 40
    added = temporary_bytes(name, many, 2) - temporary_bytes(name, few, 2)
    assert added / (many - few) < 4 * BATCH * FEATURES / 2
    if name == "Mime":  # the test can fail
        added = temporary_bytes(name, many, None) - temporary_bytes(name, few, None)
        assert added / (many - few) > 4 * FEATURES**2


@every_method
def test_the_gradient_is_that_without_chunks(name: str):
    (chunked, args), (whole, _) = compiled(name, 8, 2), compiled(name, 8, None)
    expected = whole(*args)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(chunked(*args), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SCAFFOLD", "Mime"])
def test_higher_derivatives_and_batches_are_those_without_chunks(name: str):
    """Forward over reverse, reverse over forward, and a batch of gradients."""
    collected = []
    for chunk_size in (2, None):
        gradient, (params, state, batches) = gradient_of(name, 4, chunk_size)
        rng = np.random.default_rng(4)
        v, several = (rng.normal(size=(k, *params.shape)).astype(np.float32) for k in (1, 3))

        def of(w, gradient=gradient, state=state, batches=batches):
            return gradient(w, state, batches)

        def along(w, of=of, v=v[0]):
            return jnp.sum(of(w) * v)

        derivatives = jax.jit(
            lambda w, of=of, along=along, v=v[0], several=several: (
                jax.jvp(of, (w,), (v,))[1],
                jax.grad(along)(w),
                jax.vmap(of)(several / 5),
            )
        )
        collected.append(derivatives(params))
    for chunked, whole in zip(*collected, strict=True):
        scale = np.abs(whole).max()
        assert scale > 1e-3
        np.testing.assert_allclose(chunked, whole, rtol=1e-4, atol=1e-5 * scale)
    np.testing.assert_allclose(
        collected[0][0], collected[0][1], rtol=1e-3, atol=1e-4 * scale
    )  # symmetric


def test_evaluation_after_fine_tuning():
    """Its metrics too can be differentiated without a term of each client."""
    sizes = []
    for clients in (8, 40):
        evaluate = fine_tuning_evaluation(
            loss_fn, cohort_size=clients, client_optimizer=optax.sgd(0.2), chunk_size=2
        )
        x = np.random.default_rng(0).normal(size=(clients, STEPS, BATCH, FEATURES))

        def loss(w, x, evaluate=evaluate):
            return evaluate(w, Cohort(x), Cohort(x))["fine_tuned_loss"] ** 2

        step = jax.jit(jax.grad(loss)).lower(params_of("FedAvg"), jnp.asarray(x, jnp.float32))
        sizes.append(step.compile().memory_analysis().temp_size_in_bytes)
    assert (sizes[1] - sizes[0]) / 32 < 4 * BATCH * FEATURES / 2
