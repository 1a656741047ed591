"""The asynchronous methods without a schedule, which are the synchronous ones."""

import numpy_methods as reference
import optax
from method_problem import Method, Rates, loss_fn

from fedpax.aggregators import mean
from fedpax.algorithms import DelayedNesterov, async_diloco, decoupled_diloco, fedbuff, halos

BETA = 0.8


def _halos(islands, r):
    """Make HALoS with two regions, whose servers take the mean of their islands."""
    regions = min(2, max(islands, 1))
    return halos(
        loss_fn,
        regions=[i * regions // max(islands, 1) for i in range(islands)],
        inner_optimizer=optax.adam(r.local, b1=0.9, b2=0.99, eps=1e-6),
        local_server=DelayedNesterov(1.0, 0.0, max(islands // regions, 1)),
        global_server=DelayedNesterov(r.server, BETA, regions),
        merge_weight=1.0,
    )


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
    "HALoS": Method(
        "islands",
        Rates(0.01, 0.5),
        _halos,
        lambda x, rounds, _, r: reference.diloco(
            x, rounds, reference.adam(r.local, 0.9, 0.99, 1e-6), r.server, BETA
        ),
    ),
}
