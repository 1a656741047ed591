"""FedAvg: weights, server optimizers, chunk size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
import optax
import pytest
from method_problem import PARTICIPANTS, assert_close, loss_fn
from method_table import METHODS, mesh_of, place_batches, place_params, problem, trainer, use

from fedpax import Cohort
from fedpax.algorithms import fedavg, server_adagrad, server_adam, server_yogi

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")

FEDERATED = ("FedAvg", "FedAdam")


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        pytest.param(optax.sgd(0.7, momentum=0.9), reference.momentum(0.7, 0.9), id="FedAvgM"),
        pytest.param(
            server_adagrad(0.1, b1=0.5, tau=1e-2),
            reference.server_optimizer("adagrad", 0.1, 0.5, 0.0, 1e-2),
            id="FedAdagrad",
        ),
        pytest.param(
            server_adam(0.1, b1=0.8, b2=0.9),
            reference.server_optimizer("adam", 0.1, 0.8, 0.9, 1e-3),
            id="FedAdam",
        ),
        pytest.param(
            server_yogi(0.1, b1=0.8, b2=0.9),
            reference.server_optimizer("yogi", 0.1, 0.8, 0.9, 1e-3),
            id="FedYogi",
        ),
        pytest.param(
            optax.yogi(0.05, b1=0.9, b2=0.99, eps=1e-3),
            reference.yogi(0.05, 0.9, 0.99, 1e-3),
            id="optax.yogi",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            optax.adagrad(0.1), reference.adagrad(0.1), id="optax.adagrad", marks=pytest.mark.slow
        ),
    ],
)
def test_other_server_optimizers(server: Any, expected: reference.Optimizer):
    params, rounds, weights = problem(3)
    algorithm = fedavg(
        loss_fn,
        cohort_size=PARTICIPANTS,
        client_optimizer=optax.sgd(0.2),
        server_optimizer=server,
    )
    step, state = jax.jit(algorithm.round), algorithm.init(jax.tree.map(jnp.asarray, params))
    x = {name: np.float64(p) for name, p in params.items()}
    history = reference.fedavg(x, rounds, weights, reference.sgd(0.2), expected)
    for batches, n, (wanted, metrics) in zip(rounds, weights, history, strict=True):
        state, result = step(state, Cohort(batches, n))
        assert_close((state.params, result), (wanted, metrics))


@pytest.mark.parametrize(
    ("mesh_name", "chunk_size"),
    [
        ("none", 3),  # two chunks of 3, and 2 clients left
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("4x2 automatic", 1), ("none", 1), ("none", "auto")),
                *(("4x2 explicit", 1), ("8 explicit", "auto")),
            )
        ],
    ],
)
def test_chunk_size_changes_nothing(mesh_name: str, chunk_size: int | str):
    params, (batches,), (weights,) = problem(1)
    ((state, metrics),) = trainer("FedAvg", "none").run(params, [batches], [weights])
    algorithm = fedavg(
        loss_fn,
        cohort_size=PARTICIPANTS,
        client_optimizer=optax.sgd(METHODS["FedAvg"].rates.local),
        chunk_size=chunk_size,
    )
    mesh = mesh_of(mesh_name, "clients")
    with use(mesh):
        fresh = algorithm.init(place_params(params, mesh))
        cohort = place_batches(Cohort(batches, weights), mesh, "clients")
        result = algorithm.round(fresh, cohort)
    assert_close((result[0].params, result[1]), (state.params, metrics))


def test_without_num_examples_all_clients_weigh_the_same():
    params, (batches,), _ = problem(1)
    ((state, metrics),) = trainer("FedAvg", "none").run(params, [batches], [[7] * PARTICIPANTS])
    algorithm = METHODS["FedAvg"].algorithm()
    result = algorithm.round(algorithm.init(jax.tree.map(jnp.asarray, params)), Cohort(batches))
    assert_close((result[0].params, result[1]), (state.params, metrics))


def test_only_the_ratios_of_weights_matter():
    params, rounds, weights = problem(2)
    compiled = trainer("FedAvg", "none")
    assert_close(compiled.run(params, rounds, weights), compiled.run(params, rounds, 12 * weights))


@pytest.mark.each_value
@pytest.mark.parametrize("mesh_name", ["none", "4x2 automatic", "4x2 explicit"])
@pytest.mark.parametrize("name", FEDERATED)
def test_a_client_of_weight_zero_equals_an_absent_client(name: str, mesh_name: str):
    params, rounds, weights = problem(2)
    weights[:, [1, 6]] = 0
    history = trainer(name, mesh_name).run(params, rounds, weights)
    others = [i for i in range(PARTICIPANTS) if i not in (1, 6)]
    fewer = [jax.tree.map(lambda b: b[others], batches) for batches in rounds]
    expected = METHODS[name].reference(params, fewer, weights[:, others])
    for (state, metrics), wanted in zip(history, expected, strict=True):
        assert_close((state.params, metrics), wanted)


@pytest.mark.each_value
@pytest.mark.parametrize("mesh_name", ["none", "4x2 automatic"])
@pytest.mark.parametrize("name", FEDERATED)
def test_a_round_without_examples(name: str, mesh_name: str):
    """The model stays where it is, and so does the momentum of the server."""
    params, rounds, weights = problem(3)
    weights[1] = 0
    history = trainer(name, mesh_name).run(params, rounds, weights)
    for (state, metrics), wanted in zip(
        history, METHODS[name].reference(params, rounds, weights), strict=True
    ):
        assert_close((state.params, metrics), wanted)
    (first, _), (second, nothing), _ = history
    assert all(metric == 0 for metric in nothing.values())
    assert np.abs(second.params["kernel"] - first.params["kernel"]).max() == 0


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (np.ones(PARTICIPANTS - 1), rf"num_examples has shape \[7\], expected \[{PARTICIPANTS}\]"),
        (np.ones((PARTICIPANTS, 1)), "one entry for each participant"),
        ([1, 2], "num_examples is a list, expected an array"),
    ],
)
def test_weights_of_another_shape_raise(weights: Any, words: str):
    params, (batches,), _ = problem(1)
    algorithm = METHODS["FedAvg"].algorithm()
    with pytest.raises((ValueError, TypeError), match=words):
        algorithm.round(algorithm.init(params), Cohort(batches, weights))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: server_adam(0.0),
            r"server_adam\(\): learning_rate is 0.0, expected a positive finite number",
        ),
        (
            lambda: server_yogi(float("nan")),
            "learning_rate is nan, expected a positive finite number",
        ),
        (lambda: server_adagrad(0.1, tau=-1.0), "tau is -1.0, expected a positive finite number"),
        (
            lambda: server_adam(0.1, b2=1.0),
            "b2 is 1.0, expected a number of at least 0 and below 1",
        ),
        (
            lambda: server_yogi(0.1, b1=-0.1),
            "b1 is -0.1, expected a number of at least 0 and below 1",
        ),
    ],
)
def test_settings_of_server_optimizers_out_of_range_raise(make, words):
    with pytest.raises(ValueError, match=words):
        make()
