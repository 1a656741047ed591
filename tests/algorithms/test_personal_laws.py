"""Laws of the methods for personal models and clusters, on random problems."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from federated_problem import (
    CLIENTS,
    COMMON,
    IDS,
    SGD,
    START,
    STORED,
    examples_of,
    loss_fn,
    plain_fedavg,
    random_cohort,
    run,
)
from method_problem import assert_close

from fedpax import Cohort
from fedpax.aggregators import adaptive_clip, chain, mean, private_mean
from fedpax.algorithms import (
    apfl,
    apfl_models,
    choose_cluster,
    ditto,
    fine_tuning_evaluation,
    hypcluster,
    local_steps,
)
from fedpax.clients import gather_clients


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


@pytest.mark.parametrize("clusters", [1, 2])
def test_hypcluster_is_fedavg_of_the_clients_that_choose_a_model(clusters: int):
    cohort = random_cohort(ragged=True)
    models = jnp.stack([START, -START])[:clusters]
    # Each model has the state of an aggregator: the two bounds are not equal in the second round.
    settings = COMMON | {
        "aggregator": chain(adaptive_clip(initial_norm=0.12, learning_rate=1.0), mean())
    }
    algorithm = hypcluster(loss_fn, num_clusters=clusters, **settings)
    state, train = algorithm.init(models), jax.jit(algorithm.round)
    plain = plain_fedavg(loss_fn, **settings)
    alone, step = [plain.init(model) for model in models], jax.jit(plain.round)
    choose = jax.jit(functools.partial(choose_cluster, loss_fn))
    for _ in range(2):
        chosen = np.array(
            [
                choose(state.params, jax.tree.map(lambda b, i=i: b[i], cohort.batches), steps)
                for i, steps in enumerate(cohort.num_steps)
            ]
        )
        assert set(chosen) == set(range(clusters))
        state, metrics = train(state, cohort)
        for j in range(clusters):
            given = cohort._replace(num_examples=np.where(chosen == j, cohort.num_examples, 0))
            alone[j], result = step(alone[j], given)
            assert_close(state.params[j], alone[j].params)
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
