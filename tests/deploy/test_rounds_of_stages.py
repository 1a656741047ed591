"""Rounds of several stages on nodes: keys, values between stages, states, and shown values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deploy.nodes import LocalNetwork, N, normal

import fedpax
from fedpax import federated_map, federated_mean, federated_sum
from fedpax.aggregators import private_mean
from fedpax.algorithm import FederatedAlgorithm
from fedpax.deploy.nodes.node import NodeProgram
from fedpax.deploy.nodes.round_server import RoundError, RoundServer, Rules
from fedpax.deploy.round_program import Settings, pack_program, parse_program
from fedpax.errors import ConfigurationError
from fedpax.sites.coordinator_program import check_repeatable


class State(NamedTuple):
    w: Any
    residual: Any  # [clients, ...]
    key: Any


@fedpax.program(clients=N)
def two_stages(state, cohort):
    key, used = jax.random.split(state.key)
    keys = jax.random.split(used, N)

    def draw(residual, x, key):
        noise = jax.random.normal(key, x.shape)
        update = x * noise + residual
        return update, jnp.max(jnp.abs(update))

    update, sizes = federated_map(draw, state.residual, cohort.batches[:, 0, 0], keys)
    scale = fedpax.federated_max(sizes)

    def compress(update):
        sent = jnp.round(update / scale * 8) * scale / 8
        return sent, update - sent

    sent, residual = federated_map(compress, update)
    spread = federated_sum(federated_map(lambda s: jnp.sum(s**2), sent))
    metrics = {"spread": spread, "median": jnp.median(sizes)}
    return State(state.w + federated_mean(sent), residual, key), metrics


def init_state(params):
    return State(params, jnp.zeros((N, 3)), jax.random.key(4))


ALGORITHM = FederatedAlgorithm(init_state, two_stages)
X = normal(4, N, 1, 1, 3)


def by_jit(rounds):
    state = init_state(jnp.ones(3))
    for number in range(rounds):
        state, metrics = jax.jit(ALGORITHM.round)(state, fedpax.Cohort(X[number]))
    return state, metrics


@pytest.fixture(scope="module")
def program():
    cohort = fedpax.Cohort(jax.ShapeDtypeStruct((N, 1, 1, 3), np.float32))
    settings = Settings(rounds=4, num_clients=N)
    return parse_program(pack_program(ALGORITHM, lambda key: jnp.ones(3), cohort, settings))


def load_data(node):
    k = node.participant
    return lambda number: fedpax.Cohort(X[number][k : k + 1])


def network_of(program, folder, lost=lambda values, node: None):
    network = LocalNetwork(program, folder, lost=lost)
    network.programs = {
        node: NodeProgram(program, load_data, folder / str(node)) for node in network.programs
    }
    return network


def serve(network, program, **rules):
    server = RoundServer(network, program, run="r", rules=Rules(**rules), sleep=lambda s: None)
    position, all_metrics = server.begin(), []
    for _ in range(4):
        position, metrics = server.advance(position)
        all_metrics.append(metrics)
    return position, all_metrics


class NoisyState(NamedTuple):
    w: Any
    aggregator: Any


def test_the_server_of_nodes_draws_its_noise(tmp_path):
    """With one seed, two runs and a simulation have other noise, each of the stated size."""
    aggregator = private_mean(max_norm=1.0, noise_multiplier=2.0, seed=0)

    @fedpax.program(clients=N)
    def noisy(state, cohort):
        updates = federated_map(lambda x: jnp.zeros(4000) * x[0, 0, 0], cohort.batches)
        mean, kept, metrics = aggregator.aggregate(state.aggregator, updates, None)
        return NoisyState(state.w + mean, kept), metrics

    method = FederatedAlgorithm(lambda w: NoisyState(w, aggregator.init(w)), noisy)
    cohort = fedpax.Cohort(jax.ShapeDtypeStruct((N, 1, 1, 3), np.float32))
    settings = Settings(rounds=4, num_clients=N)
    packed = pack_program(method, lambda key: jnp.zeros(4000), cohort, settings)
    noisy_program = parse_program(packed)
    runs = []
    for where in "12":
        network = network_of(noisy_program, tmp_path / where)
        runs.append(serve(network, noisy_program)[0].state["state.w"])
    simulated = method.init(jnp.zeros(4000))
    for number in range(4):
        simulated, _ = jax.jit(noisy)(simulated, fedpax.Cohort(X[number]))
    runs.append(simulated.w)
    stddev = 4**0.5 * 2.0 / N
    for i, first in enumerate(runs):
        assert np.std(first) == pytest.approx(stddev, rel=0.06)
        for second in runs[:i]:
            assert np.std(first - second) == pytest.approx(2**0.5 * stddev, rel=0.06)


def test_a_round_that_sent_a_noisy_mean_is_not_repeated(tmp_path):
    """The same round again would release another noisy mean, which no epsilon counts."""
    aggregator = private_mean(max_norm=1.0, noise_multiplier=2.0, seed=0)

    @fedpax.program(clients=N)
    def noisy(state, cohort):
        updates = federated_map(lambda x: x[0, 0], cohort.batches)
        mean, kept, metrics = aggregator.aggregate(state.aggregator, updates, None)
        far = federated_mean(federated_map(lambda u: jnp.sum((u - mean) ** 2), updates))
        return NoisyState(state.w + mean * far, kept), metrics

    method = FederatedAlgorithm(lambda w: NoisyState(w, aggregator.init(w)), noisy)
    cohort = fedpax.Cohort(jax.ShapeDtypeStruct((N, 1, 1, 3), np.float32))
    state = jax.eval_shape(method.init, jnp.ones(3))
    assert fedpax.stages(noisy, state, cohort).noisy_request == 1
    settings = Settings(rounds=4, num_clients=N)
    noisy_program = parse_program(pack_program(method, lambda key: jnp.ones(3), cohort, settings))
    lost = lambda values, node: "before" if values.get("stage") == 1 else None
    network = network_of(noisy_program, tmp_path, lost)
    with pytest.raises(RoundError, match="would spend its epsilon twice"):
        serve(network, noisy_program, deadline=0.5)
    with pytest.raises(ConfigurationError, match="would spend its epsilon twice"):
        check_repeatable(fedpax.stages(noisy, state, cohort), 1, 1)
    check_repeatable(fedpax.stages(noisy, state, cohort), 0, 1)


def test_stages_on_nodes_equal_the_compiled_rounds(program, tmp_path):
    position, metrics = serve(network_of(program, tmp_path), program)
    expected, last = by_jit(4)
    np.testing.assert_allclose(position.state["state.w"], expected.w, rtol=0, atol=1e-6)
    assert position.state["state.key"] == expected.key
    for name, value in last.items():
        np.testing.assert_allclose(metrics[-1][f"['{name}']"], value, rtol=0, atol=1e-5)
    assert len(program.artifact) == 2 and np.abs(expected.residual).max() > 1e-3


def test_a_participant_that_is_lost_between_stages_takes_its_state_back(program, tmp_path):
    def lost(values, node):
        return "before" if (values.get("round"), values.get("stage"), node) == (1, 1, 101) else None

    network = network_of(program, tmp_path, lost)
    _, metrics = serve(network, program, quorum=2, deadline=1e-9)
    assert [m["participants"] for m in metrics] == [3, 2, 3, 3]
    seen = [
        (p.values["key"], p.values["stage"], p.values["counted"])
        for node, p in network.log
        if node == 101 and "key" in p.values and p.values["round"] in (1, 2)
    ]
    assert seen == [("1.0", 0, "0.0"), ("1.0", 1, "0.0"), ("2.0", 0, "0.0"), ("2.0", 1, "0.0")]


def test_a_node_that_starts_again_between_stages_is_told(program, tmp_path, caplog):
    def lost(values, node):
        if (values.get("round"), values.get("stage"), node) == (1, 1, 101):
            for path in (tmp_path / "101").rglob("1.0-0.state"):
                path.unlink()

    _, metrics = serve(network_of(program, tmp_path, lost), program, quorum=2, deadline=1e-9)
    assert [m["participants"] for m in metrics] == [3, 2, 3, 3]
    assert "started again within the round" in caplog.text
