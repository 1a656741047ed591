"""Laws of the federated methods: special cases in which two methods are one."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from federated_problem import (
    CLIENTS,
    COMMON,
    IDS,
    POPULATION,
    SGD,
    START,
    STEPS,
    STORED,
    examples_of,
    loss_fn,
    plain_fedavg,
    random_cohort,
    run,
)
from method_problem import assert_close

from fedpax import Cohort, federated_map, federated_max, federated_mean
from fedpax.aggregators import Aggregator, coordinate_median, quantized_mean
from fedpax.algorithms import (
    FedAcRates,
    agnostic,
    apfl,
    ditto,
    fedac,
    fedavg,
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
from fedpax.algorithms.agnostic import project_to_simplex


def check_equals_fedavg(algorithm: Any, cohort: Cohort, **settings: Any) -> None:
    """Compare parameters and the metrics that both report after three rounds."""
    expected, metrics = run(plain_fedavg(loss_fn, **COMMON | settings), cohort)
    state, result = run(algorithm, cohort)
    assert_close(state.params, expected.params)
    assert_close({name: result[name] for name in metrics}, metrics)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(lambda: fedprox(loss_fn, mu=0.0, **COMMON), {}, id="FedProx, mu = 0"),
        pytest.param(lambda: feddyn(loss_fn, alpha=0.0, **STORED), {}, id="FedDyn, alpha = 0"),
        pytest.param(lambda: ditto(loss_fn, lam=0.7, **STORED), {}, id="Ditto's shared model"),
        pytest.param(lambda: apfl(loss_fn, mixing=0.7, **STORED), {}, id="APFL's shared model"),
        pytest.param(
            lambda: reptile(loss_fn, meta_learning_rate=0.3, **COMMON),
            {"server_optimizer": optax.sgd(0.3)},
            id="Reptile",
        ),
        pytest.param(
            lambda: per_fedavg(loss_fn, adaptation_learning_rate=0.0, **COMMON),
            None,
            id="Per-FedAvg, alpha = 0",
        ),
    ],
)
def test_equals_fedavg(build: Any, settings: Any):
    """With weights, and clients of unequal length."""
    if settings is not None:
        return check_equals_fedavg(build(), random_cohort(ragged=True), **settings)
    cohort = random_cohort(ragged=True)
    halves = cohort._replace(batches=jax.tree.map(lambda b: b[:, :, 1::2], cohort.batches))
    expected, metrics = run(plain_fedavg(loss_fn, **COMMON), halves)
    state, result = run(build(), cohort)
    assert_close((state.params, result), (expected.params, metrics))


@pytest.mark.parametrize("client", [SGD, optax.sgd(0.05, momentum=0.5, nesterov=True)])
def test_fednova_with_equal_steps_is_fedavg(client: Any):
    algorithm = fednova(loss_fn, cohort_size=CLIENTS, client_optimizer=client)
    check_equals_fedavg(algorithm, random_cohort(), client_optimizer=client)


def test_fednova_does_not_depend_on_how_often_clients_repeat_a_step():
    """Check a constant gradient: a client's number of steps changes the length alone."""
    linear = lambda w, batch: (jnp.vdot(w, batch["x"].mean(0)), {})
    cohort = random_cohort()
    same = jax.tree.map(lambda b: np.repeat(b[:, :1], STEPS, axis=1), cohort.batches)
    algorithm = fednova(linear, **COMMON)
    moves = []
    for num_steps in ([1, 1, 1, 1], [1, 3, 2, 3]):
        given = cohort._replace(batches=same, num_steps=np.array(num_steps))
        moves.append(run(algorithm, given, rounds=1)[0].params - START)
    shares = cohort.num_examples / cohort.num_examples.sum()
    assert_close(moves[1], moves[0] * np.dot(shares, [1, 3, 2, 3]))


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_with_zero_controls_and_one_step_is_fedsgd(option: str):
    cohort = random_cohort(steps=1)
    state, _ = run(scaffold(loss_fn, option=option, **STORED), cohort, rounds=1)
    gradient = jax.jit(jax.vmap(jax.grad(lambda w, b: loss_fn(w, b)[0]), in_axes=(None, 0)))
    batches = jax.tree.map(lambda b: b[:, 0], cohort.batches)
    gradients = gradient(START, batches)
    mean = np.average(gradients, axis=0, weights=cohort.num_examples)
    assert_close(state.params, START - 0.05 * mean)
    assert_close(state.client_controls.to_host()[IDS], gradients)
    assert_close(state.control, np.sum(gradients, axis=0) / POPULATION)


def test_scaffolds_control_is_the_mean_of_the_clients():
    """Option II by its formula, over rounds, with clients of unequal length."""
    state, _ = run(scaffold(loss_fn, **STORED), random_cohort(ragged=True))
    controls = state.client_controls.to_host()
    assert not controls[[1, 4]].any() and np.abs(controls[IDS]).min() > 1e-3
    assert_close(state.control, controls.mean(0))


def test_feddyns_drift_is_the_mean_of_the_clients():
    cohort = random_cohort(ragged=True)._replace(num_examples=None)
    state, _ = run(feddyn(loss_fn, alpha=0.5, **STORED), cohort)
    gradients = state.client_gradients.to_host()
    assert not gradients[[1, 4]].any() and np.abs(gradients[IDS]).min() > 1e-3
    assert_close(state.drift, gradients.mean(0))


def test_agnostic_with_fixed_weights_is_fedavg():
    sizes = np.array([24, 7, 23, 15, 9, 8])  # the sizes at IDS are the cohort's
    algorithm = agnostic(loss_fn, mixture_learning_rate=0.0, initial_mixture=sizes, **STORED)
    check_equals_fedavg(algorithm, random_cohort(ragged=True))


def test_a_non_finite_loss_does_not_enter_agnostics_mixture():
    """The other clients' losses do, as if the client had not been there."""
    algorithm = agnostic(
        lambda w, x: (jnp.mean((w - x) ** 2), {}),
        cohort_size=3,
        num_clients=4,
        client_optimizer=optax.sgd(0.1),
        mixture_learning_rate=0.01,
        aggregator=coordinate_median(),
    )
    batches, client_ids = np.float32([1.0, 2.0, np.inf]).reshape(3, 1, 1), np.arange(3)
    step, state = jax.jit(algorithm.round), algorithm.init(jnp.float32(0.0))
    after, _ = step(state, Cohort(batches, client_ids=client_ids))
    wanted, _ = step(state, Cohort(batches, client_ids=np.array([0, 1, -1])))
    chex.assert_tree_all_finite(after)
    assert after.mixture[1] > after.mixture[0] > after.mixture[3]
    assert_close(after.mixture, wanted.mixture)


def test_agnostic_evens_out_the_clients_losses():
    """Two clients that disagree: the largest loss falls below FedAvg's."""
    cohort = random_cohort()._replace(num_examples=np.array([50, 1, 1, 1]))
    worst, loss = {}, jax.jit(loss_fn)
    for name, algorithm in (
        ("FedAvg", fedavg(loss_fn, **COMMON)),
        ("agnostic", agnostic(loss_fn, mixture_learning_rate=0.002, **STORED)),
    ):
        state, _ = run(algorithm, cohort, rounds=100)
        each = [loss(state.params, examples_of(cohort, i))[0] for i in range(CLIENTS)]
        worst[name] = max(each)
    assert_close(jnp.sum(state.mixture), 1.0)
    assert (state.mixture >= 0).all()
    assert worst["agnostic"] < 0.6 * worst["FedAvg"]


def test_the_projection_to_the_simplex_is_the_nearest_point():
    """Against the variational inequality <v - p, q - p> <= 0 for all q of the simplex."""
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 10.0):
        v = rng.normal(size=7) * scale
        p = np.asarray(jax.jit(project_to_simplex)(np.float32(v)), np.float64)
        assert (p >= 0).all() and abs(p.sum() - 1) < 1e-6
        assert max((v - p) @ (q - p) for q in np.eye(7)) < 1e-5 * max(scale, 1)


def test_fedac_without_acceleration_is_local_sgd():
    cohort = random_cohort()._replace(num_examples=None)
    plain = local_sgd(loss_fn, islands=CLIENTS, optimizer=SGD)
    expected, metrics = run(plain, cohort)
    algorithm = fedac(loss_fn, cohort_size=CLIENTS, rates=FedAcRates(0.05, 0.05, 1.0, 1.0))
    state, result = run(algorithm, cohort)
    assert_close((state.params, result), (expected.params, metrics))
    assert_close(state.main, state.params)


def test_local_sgd_keeps_its_optimizer_state():
    """A schedule counts the steps of all rounds."""
    schedule = optax.sgd(lambda count: 0.05 / (1 + count))
    state, _ = run(local_sgd(loss_fn, islands=CLIENTS, optimizer=schedule), random_cohort())
    assert jax.tree.leaves(state.inner_optimizer_state)[0].tolist() == [3 * STEPS] * CLIENTS


@pytest.mark.each_value
@pytest.mark.parametrize("build", [mime, mime_lite])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.05, momentum=0.7), mime_adam(0.05)])
def test_mime_with_one_client_and_step_is_plain_training(build: Any, optimizer: Any):
    """With any optimizer: the state that the server advances is the one the client has used."""
    cohort = jax.tree.map(lambda leaf: leaf[:1], random_cohort(steps=1))
    state, _ = run(build(loss_fn, cohort_size=1, client_optimizer=optimizer), cohort)
    batch = jax.tree.map(lambda b: b[0, 0], cohort.batches)

    @jax.jit
    def step(w: Any, own: Any) -> tuple[Any, Any]:
        gradient = jax.grad(lambda w: loss_fn(w, batch)[0])(w)
        updates, own = optimizer.update(gradient, own)
        return optax.apply_updates(w, updates), own

    w, own = START, optimizer.init(START)
    for _ in range(3):
        w, own = step(w, own)
    assert_close((state.params, state.client_optimizer_state), (w, own))


def test_mime_removes_the_clients_bias():
    """With one batch a client, all clients take the first step along the same direction."""
    cohort = random_cohort(steps=1)

    def aggregate(state: Any, updates: Any, weights: Any) -> Any:
        mean = federated_mean(updates, weights)
        apart = federated_map(lambda u: jnp.max(jnp.abs(u - mean)), updates)
        return mean, state, {"spread": federated_max(apart)}

    spread = Aggregator(lambda params: (), aggregate)
    spreads = {}
    for name, build in {"mime": mime, "mime_lite": mime_lite}.items():
        algorithm = build(loss_fn, aggregator=spread, **COMMON)
        state, metrics = run(algorithm, cohort, rounds=1)
        spreads[name] = metrics["spread"]
    gradients = jax.vmap(
        jax.grad(lambda w, x, y: loss_fn(w, {"x": x, "y": y})[0]), in_axes=(None, 0, 0)
    )(START, cohort.batches["x"][:, 0], cohort.batches["y"][:, 0])
    mean = np.average(gradients, axis=0, weights=cohort.num_examples)
    assert_close(state.params, START - 0.05 * mean)
    assert spreads["mime"] < 1e-6 and spreads["mime_lite"] > 1e-2


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(fedac, {"rates": FedAcRates(0.05, 0.1, 2.0, 3.0)}, id="FedAc"),
        pytest.param(hypcluster, {"num_clusters": 2}, id="HypCluster", marks=pytest.mark.slow),
        *[
            pytest.param(build, settings, id=build.__name__, marks=pytest.mark.slow)
            for build, settings in (
                (fedprox, {"mu": 0.1}),
                (fednova, {}),
                (mime, {}),
                (feddyn, {"alpha": 0.1, "num_clients": POPULATION}),
                (scaffold, {"num_clients": POPULATION}),
                (ditto, {"lam": 0.1, "num_clients": POPULATION}),
                (apfl, {"mixing": 0.1, "num_clients": POPULATION}),
                (agnostic, {"mixture_learning_rate": 0.1, "num_clients": POPULATION}),
            )
        ],
    ],
)
def test_an_aggregator_with_state_takes_the_place_of_the_mean(build: Any, settings: Any):
    """With enough levels, quantized means with error feedback train as exact ones."""
    if build is not fedac:
        settings = settings | {"client_optimizer": SGD}
    start = jnp.stack([START, -START]) if build is hypcluster else START
    cohort, ends = random_cohort(), []
    for aggregator in (None, quantized_mean(num_levels=256)):
        algorithm = build(loss_fn, cohort_size=CLIENTS, aggregator=aggregator, **settings)
        state, step = algorithm.init(start), jax.jit(algorithm.round)
        # What is clipped of a lone member's update, which weighs four times, is sent later.
        for _ in range(60 if build is hypcluster else 3):
            state, metrics = step(state, cohort)
        ends.append((state.params, metrics["loss"]))
        assert jax.tree.structure(state) == jax.tree.structure(algorithm.init(start))
    assert np.abs(ends[0][0] - start).max() > 0.02
    chex.assert_trees_all_close(*ends, rtol=1e-2, atol=1e-3)
    assert (ends[0][0] != ends[1][0]).any()
