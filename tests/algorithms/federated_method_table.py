"""The federated methods beside FedAvg, with settings and references."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_federated_methods as reference
import numpy_methods
import optax
from method_problem import POPULATION, Method, Rates, loss_fn

from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import (
    FedAcRates,
    agnostic,
    apfl,
    ditto,
    fedac,
    feddyn,
    fednova,
    fedprox,
    hypcluster,
    local_sgd,
    mime,
    mime_adam,
    mime_lite,
    per_fedavg,
    reptile,
    scaffold,
)

RATE = 0.2


def _method(
    algorithm: Callable[..., FederatedAlgorithm],
    refer: Callable[..., Any],
    *,
    server: float | None = None,
    client: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    **settings: Any,
) -> Method:
    """Make a method of clients without state, weighted; `refer` takes the rates last."""
    return Method(
        "clients",
        Rates(RATE, server),
        lambda clients, r: algorithm(
            loss_fn=loss_fn, cohort_size=clients, client_optimizer=client(r.local), **settings
        ),
        lambda x, rounds, n, r: refer(x, rounds, n, r.local),
        weighted=True,
    )


def _stateful(
    algorithm: Callable[..., FederatedAlgorithm], refer: Callable[..., Any], **settings: Any
) -> Method:
    """Make a method whose clients keep state, in uniform means."""

    def build(cohort_size: int, **options: Any) -> FederatedAlgorithm:
        num_clients = max(POPULATION, cohort_size)
        return algorithm(cohort_size=cohort_size, num_clients=num_clients, **options)

    method = _method(build, refer, **settings)
    return method._replace(weighted=False, keeps_client_state=True)


def _scaffold(option: str) -> Method:
    return Method(
        "clients",
        Rates(RATE, 0.5),
        lambda clients, r: scaffold(
            loss_fn,
            cohort_size=clients,
            num_clients=max(POPULATION, clients),
            client_optimizer=optax.sgd(r.local),
            server_optimizer=optax.sgd(r.server),
            option=option,
        ),
        lambda x, rounds, n, r: reference.scaffold(x, rounds, n, r.local, r.server, option),
        keeps_client_state=True,
    )


def _mime(algorithm: Callable[..., FederatedAlgorithm], is_adaptive: bool) -> Method:
    if is_adaptive:
        base = reference.base_adam(0.7, 0.8, 0.1, 0.5)
        client = functools.partial(mime_adam, b1=0.7, b2=0.8, eps=0.1, initial_second_moment=0.5)
    else:
        base, client = reference.base_momentum(0.6), functools.partial(optax.sgd, momentum=0.6)
    return _method(
        algorithm,
        lambda x, rounds, n, rate: reference.mime(
            x, rounds, n, rate, base, is_corrected=algorithm is mime
        ),
        client=client,
    )


def other_model(params: Any) -> Any:
    """Return the start of HypCluster's second model."""
    return {**params, "out": params["out"][:, ::-1]}


def _hypcluster(**settings: Any) -> FederatedAlgorithm:
    algorithm = hypcluster(num_clusters=2, **settings)

    def init(params: Any) -> Any:
        pair = params, other_model(params)
        return algorithm.init(jax.tree.map(lambda *p: jnp.stack(p), *pair))

    return FederatedAlgorithm(init, algorithm.round)


FEDERATED_METHODS = {
    "FedProx": _method(
        fedprox, lambda x, rounds, n, rate: reference.fedprox(x, rounds, n, rate, 0.7), mu=0.7
    ),
    "SCAFFOLD I": _scaffold("I"),
    "SCAFFOLD": _scaffold("II"),
    "FedNova": _method(
        fednova,
        lambda x, rounds, n, rate: reference.fednova(
            x,
            rounds,
            n,
            numpy_methods.momentum(rate, 0.6),
            reference.momentum_length(rate, 0.6),
        ),
        client=lambda rate: optax.sgd(rate, momentum=0.6),
    ),
    "FedDyn": _stateful(
        feddyn, lambda x, rounds, n, rate: reference.feddyn(x, rounds, n, rate, 0.3), alpha=0.3
    ),
    "Mime": _mime(mime, is_adaptive=False),
    "MimeLite": _mime(mime_lite, is_adaptive=False),
    "MimeAdam": _mime(mime, is_adaptive=True),
    "MimeLiteAdam": _mime(mime_lite, is_adaptive=True),
    "FedAc": Method(
        "clients",
        Rates(RATE, 0.4),
        lambda clients, r: fedac(
            loss_fn, cohort_size=clients, rates=FedAcRates(r.local, r.server, 2.5, 3.5)
        ),
        lambda x, rounds, n, r: reference.fedac(x, rounds, n, r.local, r.server, 2.5, 3.5),
        weighted=True,
    ),
    "local SGD": Method(
        "islands",
        Rates(RATE, None),
        lambda islands, r: local_sgd(loss_fn, islands=islands, optimizer=optax.sgd(r.local)),
        lambda x, rounds, n, r: reference.fedprox(x, rounds, np.ones_like(n), r.local, 0.0),
    ),
    "agnostic": _stateful(
        agnostic,
        lambda x, rounds, n, rate: reference.agnostic(x, rounds, n, rate, 0.004),
        mixture_learning_rate=0.004,
    ),
    "APFL": _stateful(
        apfl,
        lambda x, rounds, n, rate: reference.apfl(x, rounds, n, rate, 0.4, 0.5),
        mixing=0.4,
        mixing_learning_rate=0.5,
    ),
    "Ditto": _stateful(
        ditto, lambda x, rounds, n, rate: reference.ditto(x, rounds, n, rate, 0.3), lam=0.3
    ),
    "HypCluster": _method(
        _hypcluster,
        lambda x, rounds, n, rate: reference.hypcluster((x, other_model(x)), rounds, n, rate),
    ),
    "Per-FedAvg": _method(
        per_fedavg,
        lambda x, rounds, n, rate: reference.per_fedavg(x, rounds, n, rate, 0.3, first_order=False),
        adaptation_learning_rate=0.3,
    ),
    "Per-FedAvg (FO)": _method(
        per_fedavg,
        lambda x, rounds, n, rate: reference.per_fedavg(x, rounds, n, rate, 0.3, first_order=True),
        adaptation_learning_rate=0.3,
        first_order=True,
    ),
    "Reptile": _method(
        reptile,
        lambda x, rounds, n, rate: reference.fedprox(x, rounds, n, rate, 0.0, 0.4),
        meta_learning_rate=0.4,
    ),
}
