"""The asynchronous methods without a schedule, which are the synchronous ones."""

import numpy_methods as reference
import optax
from method_problem import Method, Rates, loss_fn

from fedpax.aggregators import mean
from fedpax.algorithms import async_diloco, decoupled_diloco, fedbuff

BETA = 0.8

ASYNCHRONOUS_METHODS = {
    "FedBuff": Method(
        "clients",
        Rates(0.2, 0.7),
        lambda clients, r: fedbuff(
            loss_fn,
            buffer_size=clients,
            max_staleness=2,
            client_optimizer=optax.sgd(r.local),
            server_optimizer=optax.sgd(r.server),
        ),
        lambda x, rounds, n, r: reference.fedavg(
            x, rounds, n, reference.sgd(r.local), reference.sgd(r.server)
        ),
        weighted=True,
    ),
    "asynchronous DiLoCo": Method(
        "islands",
        Rates(0.01, 0.5),
        lambda islands, r: async_diloco(
            loss_fn,
            islands=islands,
            inner_optimizer=optax.adam(r.local, b1=0.9, b2=0.99, eps=1e-6),
            learning_rate=r.server,
            momentum=BETA,
        ),
        lambda x, rounds, _, r: reference.diloco(
            x, rounds, reference.adam(r.local, 0.9, 0.99, 1e-6), r.server, BETA
        ),
    ),
    "Decoupled DiLoCo": Method(
        "islands",
        Rates(0.01, 0.5),
        lambda islands, r: decoupled_diloco(
            loss_fn,
            islands=islands,
            inner_optimizer=optax.adam(r.local, b1=0.9, b2=0.99, eps=1e-6),
            outer_optimizer=optax.sgd(r.server, momentum=BETA, nesterov=True),
            aggregator=mean(),
        ),
        lambda x, rounds, _, r: reference.diloco(
            x, rounds, reference.adam(r.local, 0.9, 0.99, 1e-6), r.server, BETA
        ),
    ),
}
