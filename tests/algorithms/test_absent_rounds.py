"""A round in which every participant is absent moves neither the model nor a server's momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_any_aggregator import METHODS, SGD, STEPS, N, loss_fn

from fedpax import Cohort
from fedpax.aggregators import add_noise, chain, mean, private_mean
from fedpax.algorithms import diloco, fedavg, fedbuff, noloco, server_adam

CLIENTS = {"cohort_size": N, "client_optimizer": SGD}
SERVERS = {
    "FedAvgM": lambda **a: fedavg(
        loss_fn, server_optimizer=optax.sgd(1.0, momentum=0.9), **CLIENTS, **a
    ),
    "weight decay": lambda **a: fedavg(
        loss_fn, server_optimizer=optax.adamw(0.1, weight_decay=0.1), **CLIENTS, **a
    ),
    "fedbuff": lambda **a: fedbuff(
        loss_fn,
        buffer_size=N,
        max_staleness=1,
        client_optimizer=SGD,
        server_optimizer=server_adam(0.1),
        **a,
    ),
    "noloco": lambda: noloco(loss_fn, islands=N, inner_optimizer=SGD),
    **{
        name: METHODS[name]
        for name in ("FedAdam", "mime", "fednova", "feddyn", "scaffold II", "diloco", "muloco")
    },
    "streaming_diloco": METHODS["streaming_diloco"],
}
SLOW = ("muloco", "streaming_diloco", "feddyn", "scaffold II", "noloco", "fedbuff")


def cohort(num_steps: int) -> Cohort:
    random = np.random.default_rng(0)
    x = random.normal(size=(N, STEPS, 4, 5)).astype(np.float32)
    batches = {"x": x, "y": x[..., :2] + 1, "mask": np.ones((N, STEPS, 4), np.float32)}
    batches["mask"][:, num_steps:] = 0
    return Cohort(batches, client_ids=np.arange(N))


def start(method):
    return method.init({"kernel": jnp.ones((5, 2)), "bias": jnp.zeros(2)})


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SERVERS]
)
def test_the_model_and_the_server_optimizer_stay(name):
    method = SERVERS[name]()
    step = jax.jit(method.round)
    state, _ = step(start(method), cohort(STEPS))  # momentum
    after, _ = step(state, cohort(0))
    later, _ = step(after, cohort(STEPS))
    same = lambda a, b: jax.tree.map(np.array_equal, a, b)
    for field in ("params", "server_optimizer_state", "outer_optimizer_state", "momentum"):
        if hasattr(state, field):
            old, new = getattr(state, field), getattr(after, field)
            assert all(jax.tree.leaves(same(old, new))), field
    if name == "mime":
        assert all(
            jax.tree.leaves(same(state.client_optimizer_state, after.client_optimizer_state))
        )
    assert not all(jax.tree.leaves(same(later.params, after.params)))


@pytest.mark.parametrize(
    "aggregator",
    [
        private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
        chain(add_noise(0.1, seed=0), mean()),
    ],
    ids=["private_mean", "add_noise"],
)
def test_the_noise_of_the_server_hides_that_nobody_took_part(aggregator):
    method = SERVERS["FedAvgM"](aggregator=aggregator)
    after, _ = jax.jit(method.round)(start(method), cohort(0))
    assert not np.array_equal(after.params["kernel"], np.ones((5, 2)))


def test_a_round_without_weights_has_no_further_reduction():
    """Participation is not dynamic: the graph has the sums of the means alone."""
    method = diloco(loss_fn, islands=N, inner_optimizer=SGD)
    plain = cohort(STEPS)
    plain = Cohort({name: plain.batches[name] for name in ("x", "y")})
    text = str(jax.make_jaxpr(method.round)(start(method), plain))
    assert text.count("federated_mean[") == 4  # two parameters and two metrics
    assert "federated_sum[" not in text
