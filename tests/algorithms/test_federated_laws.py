"""Laws of the federated methods: special cases in which two methods are one."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from method_problem import assert_close

from fedpax import Cohort, federated_map, federated_max, federated_mean
from fedpax.aggregators import Aggregator, coordinate_median, private_mean, quantized_mean
from fedpax.algorithms import (
    FedAcRates,
    agnostic,
    apfl,
    apfl_models,
    choose_cluster,
    ditto,
    fedac,
    fedavg,
    feddyn,
    fednova,
    fedprox,
    fine_tuning_evaluation,
    hypcluster,
    local_sgd,
    local_steps,
    mime,
    mime_adam,
    mime_lite,
    per_fedavg,
    reptile,
    scaffold,
)
from fedpax.algorithms.agnostic import project_to_simplex
from fedpax.clients import gather_clients

CLIENTS, POPULATION, STEPS = 4, 6, 3
SGD = optax.sgd(0.05)
IDS = np.array([5, 0, 3, 2])


def loss_fn(w: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute half the mean square of a linear model's error."""
    error = batch["x"] @ w - batch["y"]
    return jnp.mean(error**2) / 2, {"bias": jnp.mean(error)}


def random_cohort(seed: int = 0, *, ragged: bool = False, steps: int = STEPS) -> Cohort:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(CLIENTS, steps, 8, 5)).astype(np.float32)
    y = np.einsum("csbf,cf->csb", x, rng.normal(size=(CLIENTS, 5))).astype(np.float32)
    num_steps = np.array([1, 3, 2, 3]) if ragged else None
    return Cohort({"x": x, "y": y}, np.array([8, 24, 15, 23]), num_steps, IDS)


START = jnp.asarray(np.random.default_rng(9).normal(size=5), jnp.float32)


def run(algorithm: Any, cohort: Cohort, rounds: int = 3) -> tuple[Any, Any]:
    state, step = algorithm.init(START), jax.jit(algorithm.round)
    for _ in range(rounds):
        state, metrics = step(state, cohort)
    assert np.abs(state.params - START).max() > 0.02
    return state, metrics


COMMON = {"cohort_size": CLIENTS, "client_optimizer": SGD}
STORED = COMMON | {"num_clients": POPULATION}


# An algorithm that is built once is compiled once.
plain_fedavg = functools.cache(fedavg)


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
    gradient = jax.vmap(jax.grad(lambda w, b: loss_fn(w, b)[0]), in_axes=(None, 0))
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


def test_ditto_without_its_term_trains_alone():
    cohort = random_cohort(ragged=True)
    state, _ = run(ditto(loss_fn, lam=0.0, **STORED), cohort, rounds=2)
    assert_close(gather_clients(state.personal_params, IDS), trained_alone(cohort, rounds=2))
    assert_close(state.personal_params.to_host()[[1, 4]], np.stack([START] * 2))


@pytest.mark.parametrize("mixing", [0.0, 1.0])
def test_apfl_is_the_shared_model_or_trains_alone(mixing: float):
    cohort = random_cohort(ragged=True)
    state, _ = run(apfl(loss_fn, mixing=mixing, **STORED), cohort, rounds=2)
    shared = np.stack([state.params] * CLIENTS)
    assert_close(apfl_models(state, IDS), trained_alone(cohort, rounds=2) if mixing else shared)


@jax.jit
def train_alone(w: jax.Array, batches: Any, steps: int) -> jax.Array:
    return local_steps(loss_fn, SGD, w, SGD.init(w), batches, steps)[0]


def trained_alone(cohort: Cohort, rounds: int) -> np.ndarray:
    models = []
    for i, steps in enumerate(cohort.num_steps):
        own = jax.tree.map(lambda b, i=i: b[i], cohort.batches)
        w = START
        for _ in range(rounds):
            w = train_alone(w, own, steps)
        models.append(w)
    return np.stack(models)


def test_apfl_mixes_from_0_to_1():
    """A large rate leads to both ends and not beyond; clients that are absent keep theirs."""
    algorithm = apfl(loss_fn, mixing=0.5, mixing_learning_rate=2.0, **STORED)
    state, _ = run(algorithm, random_cohort(), rounds=10)
    mixing = state.personal.to_host().mixing
    assert mixing[IDS].min() == 0 and mixing[IDS].max() == 1
    assert (mixing[[1, 4]] == 0.5).all()


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
    worst = {}
    for name, algorithm in (
        ("FedAvg", fedavg(loss_fn, **COMMON)),
        ("agnostic", agnostic(loss_fn, mixture_learning_rate=0.002, **STORED)),
    ):
        state, _ = run(algorithm, cohort, rounds=100)
        each = [loss_fn(state.params, examples_of(cohort, i))[0] for i in range(CLIENTS)]
        worst[name] = max(each)
    assert_close(jnp.sum(state.mixture), 1.0)
    assert (state.mixture >= 0).all()
    assert worst["agnostic"] < 0.6 * worst["FedAvg"]


def examples_of(cohort: Cohort, i: int) -> Any:
    """Return the examples of all a client's batches, as one batch."""
    return jax.tree.map(lambda b: b[i].reshape(-1, *b.shape[3:]), cohort.batches)


def test_the_projection_to_the_simplex_is_the_nearest_point():
    """Against the variational inequality <v - p, q - p> <= 0 for all q of the simplex."""
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 10.0):
        v = rng.normal(size=7) * scale
        p = np.asarray(project_to_simplex(jnp.asarray(v, jnp.float32)), np.float64)
        assert (p >= 0).all() and abs(p.sum() - 1) < 1e-6
        assert max((v - p) @ (q - p) for q in np.eye(7)) < 1e-5 * max(scale, 1)


@pytest.mark.parametrize("clusters", [1, 2])
def test_hypcluster_is_fedavg_of_the_clients_that_choose_a_model(clusters: int):
    cohort = random_cohort(ragged=True)
    models = jnp.stack([START, -START])[:clusters]
    algorithm = hypcluster(loss_fn, num_clusters=clusters, **COMMON)
    state, metrics = jax.jit(algorithm.round)(algorithm.init(models), cohort)
    choose = jax.jit(functools.partial(choose_cluster, loss_fn))
    chosen = np.array(
        [
            choose(models, jax.tree.map(lambda b, i=i: b[i], cohort.batches), steps)
            for i, steps in enumerate(cohort.num_steps)
        ]
    )
    assert set(chosen) == set(range(clusters))
    for j in range(clusters):
        weights = np.where(chosen == j, cohort.num_examples, 0)
        plain = plain_fedavg(loss_fn, **COMMON)
        given = cohort._replace(num_examples=weights)
        expected, result = jax.jit(plain.round)(plain.init(models[j]), given)
        assert_close(state.params[j], expected.params)
        if clusters == 1:
            assert_close(metrics, result)


def test_hypclusters_models_get_noise_of_their_own():
    algorithm = hypcluster(
        lambda w, x: (0 * jnp.sum(w) + jnp.mean((w[0] - x) ** 2), {}),
        cohort_size=2,
        num_clusters=2,
        client_optimizer=optax.sgd(1e-6),  # with a rate of 0, the parameters would be frozen
        aggregator=private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
    )
    models = jnp.zeros((2, 8)).at[1].set(1.0)
    cohort = Cohort(np.float32([0.0, 1.0]).reshape(2, 1, 1))  # each model has a client
    state, _ = jax.jit(algorithm.round)(algorithm.init(models), cohort)
    first, second = np.asarray(state.params - models)
    assert np.abs(np.corrcoef(first, second)[0, 1]) < 0.95
    assert min(np.std(first), np.std(second)) > 0.1


def test_hypclusters_momentum_does_not_move_a_model_that_no_client_chose():
    algorithm = hypcluster(
        lambda w, x: (jnp.mean((w - x) ** 2), {}),
        cohort_size=2,
        num_clusters=2,
        client_optimizer=optax.sgd(0.1),
        server_optimizer=optax.sgd(1.0, momentum=0.9),
    )
    state, step = algorithm.init(jnp.array([0.0, 10.0])), jax.jit(algorithm.round)
    before, _ = step(state, Cohort(np.float32([1.0, 8.0]).reshape(2, 1, 1)))
    after, _ = step(before, Cohort(np.float32([1.0, 2.0]).reshape(2, 1, 1)))
    moved = jax.tree.map(lambda new, old: (new != old).tolist(), after, before)
    assert moved.params == [True, False] != (before.params == state.params).tolist()
    assert jax.tree.leaves(moved.server_optimizer_state) == [True, False]


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


@pytest.mark.parametrize("build", [mime, mime_lite])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.05, momentum=0.7), mime_adam(0.05)])
def test_mime_with_one_client_and_step_is_plain_training(build: Any, optimizer: Any):
    """With any optimizer: the state that the server advances is the one the client has used."""
    cohort = jax.tree.map(lambda leaf: leaf[:1], random_cohort(steps=1))
    state, _ = run(build(loss_fn, cohort_size=1, client_optimizer=optimizer), cohort)
    w, own = START, optimizer.init(START)
    for _ in range(3):
        batch = jax.tree.map(lambda b: b[0, 0], cohort.batches)
        gradient = jax.grad(lambda w, batch=batch: loss_fn(w, batch)[0])(w)
        updates, own = optimizer.update(gradient, own)
        w = optax.apply_updates(w, updates)
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


def test_fine_tuning_evaluates_before_and_after():
    cohort, heldout = random_cohort(ragged=True), random_cohort(1)
    evaluate = jax.jit(fine_tuning_evaluation(loss_fn, **COMMON))
    metrics = evaluate(START, cohort, heldout)
    losses = {"loss": [], "fine_tuned_loss": []}
    for i, tuned in enumerate(trained_alone(cohort, rounds=1)):
        for name, w in (("loss", START), ("fine_tuned_loss", tuned)):
            losses[name].append(loss_fn(w, examples_of(heldout, i))[0])
    for name, values in losses.items():
        assert_close(metrics[name], np.average(values, weights=heldout.num_examples))
    assert metrics.keys() == {"loss", "bias", "fine_tuned_loss", "fine_tuned_bias"}


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(fedac, {"rates": FedAcRates(0.05, 0.1, 2.0, 3.0)}, id="FedAc"),
        pytest.param(hypcluster, {"num_clusters": 2}, id="HypCluster"),
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
