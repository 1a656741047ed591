"""Servers against the strategies of Flower: `pip install flwr`.

Flower's FedAdam, FedYogi and FedAdagrad differ from algorithm 2 of their paper: the second moment
starts at 0 and not at tau^2. FedAdam also corrects the learning rate for bias, as if one round more
had passed.
"""

import importlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from peers.server_rounds import cohort_of, draw_params, draw_updates, make

from fedpax.aggregators import bulyan, coordinate_median, krum, trimmed_mean
from fedpax.algorithms import server_adagrad, server_adam, server_yogi

pytest.importorskip("flwr")
common, strategy = (
    importlib.import_module(f"flwr.{name}") for name in ("common", "server.strategy")
)

CLIENTS, ROUNDS, TAU, ETA, B1, B2 = 11, 4, 1e-2, 0.1, 0.9, 0.95


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("flwr").setLevel(logging.ERROR)


def flower_rounds(make_strategy, updates, num_examples):
    """Run a strategy, and return the server's model after each round."""
    params = draw_params()
    names = sorted(params)
    as_message = lambda tree: common.ndarrays_to_parameters([np.asarray(tree[n]) for n in names])
    server, models = make_strategy(as_message(params)), []
    for r in range(len(updates[names[0]])):
        results = []
        for i, examples in enumerate(num_examples):
            trained = {name: params[name] + updates[name][r, i] for name in names}
            status = common.Status(common.Code.OK, "")
            results.append((None, common.FitRes(status, as_message(trained), examples, {})))
        message, _ = server.aggregate_fit(r + 1, results, [])
        arrays = common.parameters_to_ndarrays(message)
        params = dict(zip(names, arrays, strict=True))
        models.append(params)
    return models


def fedpax_rounds(algorithm_of_round, updates, num_examples, change_state=lambda state: state):
    """Run rounds, and return the server's model after each of them."""
    state, models = change_state(algorithm_of_round(0).init(draw_params())), []
    for r in range(len(updates["bias"])):
        cohort = cohort_of({name: x[r] for name, x in updates.items()}, jnp.array(num_examples))
        state, _ = jax.jit(algorithm_of_round(r).round)(state, cohort)
        models.append(state.params)
    return models


def check(ours, theirs, **tolerance):
    for own, other in zip(ours, theirs, strict=True):
        for name in own:
            np.testing.assert_allclose(own[name], other[name], **tolerance)


EXACT = {"rtol": 2e-5, "atol": 2e-6}
UPDATES = draw_updates(ROUNDS, CLIENTS)
NUM_EXAMPLES = [int(n) for n in np.random.default_rng(2).integers(1, 50, CLIENTS)]


def second_moment_from_zero(state):
    server = state.server_optimizer_state
    zeros = jax.tree.map(jnp.zeros_like, server.second_moment)
    return state._replace(server_optimizer_state=server._replace(second_moment=zeros))


def test_fedavg():
    theirs = flower_rounds(
        lambda start: strategy.FedAvg(initial_parameters=start), UPDATES, NUM_EXAMPLES
    )
    algorithm = make(CLIENTS)
    check(fedpax_rounds(lambda r: algorithm, UPDATES, NUM_EXAMPLES), theirs, **EXACT)


def test_fedavgm():
    theirs = flower_rounds(
        lambda start: strategy.FedAvgM(
            initial_parameters=start, server_learning_rate=0.5, server_momentum=0.9
        ),
        UPDATES,
        NUM_EXAMPLES,
    )
    algorithm = make(CLIENTS, server_optimizer=optax.sgd(0.5, momentum=0.9))
    check(fedpax_rounds(lambda r: algorithm, UPDATES, NUM_EXAMPLES), theirs, **EXACT)


@pytest.mark.parametrize("name", ["FedYogi", "FedAdagrad"])
def test_adaptive_servers_from_a_second_moment_of_zero(name):
    settings = {"eta": ETA, "tau": TAU, "beta_1": B1, "beta_2": B2}
    if name == "FedAdagrad":
        server = server_adagrad(ETA, tau=TAU)
        del settings["beta_1"], settings["beta_2"]
    else:
        server = server_yogi(ETA, b1=B1, b2=B2, tau=TAU)
    theirs = flower_rounds(
        lambda start: getattr(strategy, name)(initial_parameters=start, **settings),
        UPDATES,
        NUM_EXAMPLES,
    )
    algorithm = make(CLIENTS, server_optimizer=server)
    from_zero = fedpax_rounds(
        lambda r: algorithm, UPDATES, NUM_EXAMPLES, change_state=second_moment_from_zero
    )
    check(from_zero, theirs, **EXACT)
    papers = fedpax_rounds(lambda r: algorithm, UPDATES, NUM_EXAMPLES)
    with pytest.raises(AssertionError):
        check(papers, theirs, **EXACT)


def test_fedadam_without_flowers_bias_correction():
    theirs = flower_rounds(
        lambda start: strategy.FedAdam(
            initial_parameters=start, eta=ETA, tau=TAU, beta_1=B1, beta_2=B2
        ),
        UPDATES,
        NUM_EXAMPLES,
    )

    def corrected(r):
        rate = ETA * np.sqrt(1 - B2 ** (r + 2)) / (1 - B1 ** (r + 2))
        return make(CLIENTS, server_optimizer=server_adam(rate, b1=B1, b2=B2, tau=TAU))

    ours = fedpax_rounds(corrected, UPDATES, NUM_EXAMPLES, change_state=second_moment_from_zero)
    check(ours, theirs, **EXACT)


ROBUST = {
    "median": ("FedMedian", {}, coordinate_median()),
    "trimmed mean": ("FedTrimmedAvg", {"beta": 0.2}, trimmed_mean(0.2)),
    "krum": ("Krum", {"num_malicious_clients": 2}, krum(2)),
    "multi-krum": (
        "Krum",
        {"num_malicious_clients": 2, "num_clients_to_keep": 3},
        krum(2, num_selected=3),
    ),
    "bulyan": ("Bulyan", {"num_malicious_clients": 3, "to_keep": 0}, bulyan(3)),
}


@pytest.mark.parametrize("name", ROBUST)
def test_robust_means_with_faulty_clients(name):
    """With equal numbers of examples: Flower's Multi-Krum weighs by them.

    With one or two faulty clients, Bulyan's last selections are ties of two clients that are each
    other's nearest neighbour. Flower takes the first one, fedpax the one with the closer next
    neighbour.
    """
    peer, settings, aggregator = ROBUST[name]
    clients = 4 * settings.get("num_malicious_clients", 2) + 3
    updates = {key: x.copy() for key, x in draw_updates(2, clients, seed=5).items()}
    for x in updates.values():
        x[:, :2] *= 30  # two faulty clients
    equal = [7] * clients
    theirs = flower_rounds(
        lambda start: getattr(strategy, peer)(initial_parameters=start, **settings), updates, equal
    )
    algorithm = make(clients, aggregator=aggregator)
    ours = fedpax_rounds(lambda r: algorithm, updates, equal)
    check(ours, theirs, rtol=1e-4, atol=1e-5)
