"""The methods for clients as experiments, and the groups of them."""

import contextlib
import dataclasses
import inspect
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort, FederatedAlgorithm, algorithms
from fedpax.algorithms import ditto, fedavg, fedprox
from fedpax.experiments.catalog import (
    UnknownExperimentError,
    expand_groups,
    find_experiment,
    find_group,
)
from fedpax.experiments.experiment_groups import METHODS, PERSONAL_METHODS
from fedpax.experiments.fedavg_synthetic import fedavg_leaf_synthetic, fedavg_synthetic
from fedpax.experiments.fedbuff_images import fedbuff_digits
from fedpax.experiments.listing import GROUPS
from fedpax.experiments.parts.file_experiments import ServerState
from fedpax.settings.client_aggregators import aggregator
from fedpax.settings.client_methods import (
    APFL,
    ClientTraining,
    Ditto,
    FedProx,
    HypCluster,
    MethodConfig,
    PerFedAvg,
    Reptile,
    method,
)
from fedpax.settings.cohort_settings import ServerConfig
from fedpax.training.trainer import train

ALL = {**METHODS, **PERSONAL_METHODS}


def loss_fn(w, batch):
    return jnp.mean((batch - w) ** 2), {}


def training(server: ServerConfig | None = None) -> ClientTraining:
    return ClientTraining(3, 7, 0.1, (server or ServerConfig()).make(), 1)


COHORT = Cohort(
    np.random.default_rng(0).normal(size=(3, 4, 2, 5)).astype(np.float32),
    client_ids=np.array([0, 5, 2]),
)


@pytest.mark.parametrize("name", ALL)
def test_a_round_of_each_method_keeps_the_state(name: str) -> None:
    method = ALL[name].get("method", fedavg_synthetic().method)
    algorithm = method.make(loss_fn, training(ALL[name].get("server")))
    init = method.make_init(lambda key: jax.random.normal(key, 5))
    state = jax.eval_shape(lambda key: algorithm.init(init(key)), jax.random.key(0))
    after, metrics = jax.eval_shape(algorithm.round, state, COHORT)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert metrics["loss"].shape == ()
    models = jax.eval_shape(partial(method.personal_models, loss_fn, 0.1), after, COHORT)
    assert models.shape == (3, 5)


def test_clusters_start_from_different_models_and_clients_choose_the_better_one() -> None:
    method = HypCluster(num_clusters=3)
    models = method.make_init(lambda key: jax.random.normal(key, 5))(jax.random.key(0))
    assert models.shape == (3, 5) and len(np.unique(models, axis=0)) == 3
    batches = np.tile(np.asarray(models)[[2, 0, 2], None, None], (1, 4, 2, 1)) + np.float32(0.01)
    chosen = method.personal_models(loss_fn, 0.1, ServerState(models), Cohort(batches))
    np.testing.assert_array_equal(chosen, np.asarray(models)[[2, 0, 2]])


def test_clients_adapt_the_shared_model_on_their_own_batches() -> None:
    start = np.random.default_rng(1).normal(size=5).astype(np.float32)
    batches, state = np.asarray(COHORT.batches), ServerState(start)
    cohort = COHORT._replace(num_steps=np.array([4, 2, 0], np.int32))
    (shared, once, trained) = (
        np.asarray(method.personal_models(loss_fn, 0.2, state, cohort))
        for method in (FedProx(), PerFedAvg(adaptation_learning_rate=0.3), Reptile())
    )
    for i, steps in enumerate((4, 2, 0)):
        w, gradients = start, []
        for batch in batches[i, :steps]:
            gradients.append(2 * (start - batch.mean(0)) / 5)
            w = w - 0.2 * 2 * (w - batch.mean(0)) / 5
        np.testing.assert_array_equal(shared[i], start)
        adapted = start - 0.3 * np.mean(gradients, axis=0) if steps else start
        np.testing.assert_allclose(once[i], adapted, rtol=1e-5)
        np.testing.assert_allclose(trained[i], w, rtol=1e-5)


def test_clients_keep_their_own_models() -> None:
    on = training()
    for keeps in (Ditto(lam=0.5), APFL(mixing=0.25)):
        algorithm = keeps.make(loss_fn, on)
        state, _ = algorithm.round(algorithm.init(jnp.zeros(5)), COHORT)
        models = keeps.personal_models(loss_fn, 0.1, state, COHORT)
        assert len(np.unique(models, axis=0)) == 3
        order = np.array([2, 0, 1])
        moved = COHORT._replace(client_ids=COHORT.client_ids[order])
        np.testing.assert_array_equal(
            keeps.personal_models(loss_fn, 0.1, state, moved), models[order]
        )


def tied(loss_fn, *, cohort_size, num_clients, client_optimizer) -> FederatedAlgorithm:
    """Train with a method of this test."""
    return ditto(
        loss_fn,
        cohort_size=cohort_size,
        num_clients=num_clients,
        client_optimizer=client_optimizer,
        lam=0.5,
    )


def test_a_method_of_another_name_has_its_own_models() -> None:
    algorithm = method(tied).make(loss_fn, training())
    state, _ = algorithm.round(algorithm.init(jnp.zeros(5)), COHORT)
    models = [
        config.personal_models(loss_fn, 0.1, state, COHORT)
        for config in (method(tied), Ditto(lam=0.5))
    ]
    np.testing.assert_array_equal(*models)


def test_the_groups_have_every_method() -> None:
    """A method of the second group makes models for its clients."""
    shared, personal = (
        {fields["method"].function for fields in group.values() if "method" in fields}
        for group in (METHODS, PERSONAL_METHODS)
    )
    functions = {name: MethodConfig.of(name).function for name in MethodConfig.functions()}
    assert shared | personal | {functions["fedavg"]} == set(functions.values())
    assert personal == {f for f in functions.values() if method(f).has_own_models}


@pytest.mark.parametrize("name", PERSONAL_METHODS)
def test_which_models_are_kept_and_not_made_from_batches(name: str) -> None:
    config = MethodConfig.of(name)()
    init = config.make_init(lambda key: jax.random.normal(key, 5))
    made = config.make(loss_fn, training())
    state = jax.eval_shape(lambda key: made.init(init(key)), jax.random.key(0))
    read = partial(config.personal_models, loss_fn, 0.1)
    without_batches = Cohort({}, client_ids=COHORT.client_ids)
    with contextlib.nullcontext() if made.kept_models else pytest.raises(IndexError):
        assert jax.eval_shape(read, state, without_batches).shape == (3, 5)


DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_private_means_has_every_method_that_sends_more() -> None:
    page = (DOCS / "aggregators.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*) \| (.*) \| (?:none|yes) \|$", page, re.MULTILINE)
    sends = {name: what for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    alone = {
        name.replace("self_tuning_fedavg", "self_tuning"): MethodConfig.of(name)().sent_exactly
        is None
        for name in MethodConfig.functions()
        if name != "fedavg"
    }
    assert {name: sends.get(name) == "nothing" for name in alone} == alone
    assert alone.keys() <= sends.keys()


def test_the_page_of_methods_names_those_with_an_argument_for_all_clients() -> None:
    page = (DOCS / "methods.md").read_text("utf-8")
    (named,) = re.findall(r"^- (.*) also take `num_clients=`", page, re.MULTILINE)
    functions = {
        n: f for n in algorithms.__all__ if inspect.isfunction(f := getattr(algorithms, n))
    }
    taking = {n for n, f in functions.items() if "num_clients" in inspect.signature(f).parameters}
    assert {name.lower() for name in re.split(", | and ", named)} == taking


@pytest.mark.parametrize("num_clusters", [0, -1])
def test_a_number_of_clusters_below_1_is_refused(num_clusters: int) -> None:
    with pytest.raises(ValueError, match=r"method\.num_clusters=.* expected an int of at least 1"):
        HypCluster(num_clusters=num_clusters)


def test_an_experiment_with_one_model_refuses_clusters() -> None:
    with pytest.raises(ValueError, match="hypcluster has a model for each cluster"):
        dataclasses.replace(fedavg_synthetic(), method=HypCluster())


def test_fields_of_the_method_and_shared_settings_reach_the_algorithm() -> None:
    server = ServerConfig(learning_rate=0.5, b1=0.9)
    made = FedProx(mu=3.0).make(loss_fn, training(server))
    by_hand = fedprox(
        loss_fn,
        cohort_size=3,
        client_optimizer=optax.sgd(0.1),
        mu=3.0,
        server_optimizer=optax.sgd(0.5, momentum=0.9),
    )
    results = [
        algorithm.round(algorithm.init(jnp.zeros(5)), COHORT)[0].params
        for algorithm in (made, by_hand)
    ]
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["personal_digits:apfl", "personal_digits:hypcluster", "methods_synthetic:agnostic"]
)
def test_an_experiment_of_a_group_trains(name: str, tmp_path) -> None:
    experiment = find_experiment(name)()
    changed = dataclasses.replace(experiment.training, rounds=2)
    outcome = train(dataclasses.replace(experiment, training=changed), tmp_path, exp=name)
    assert outcome.rounds == 2 and 0 <= outcome.evaluation["accuracy"] <= 1


@pytest.mark.slow
def test_leaf_clients_train_and_are_evaluated_on_other_examples(tmp_path) -> None:
    experiment = fedavg_leaf_synthetic()
    changed = dataclasses.replace(experiment.training, rounds=20)
    outcome = train(dataclasses.replace(experiment, training=changed), tmp_path)
    assert outcome.evaluation["accuracy"] > 0.35  # the most frequent of five labels: 0.27


def test_a_tenth_of_each_synthetic_client_is_held_out() -> None:
    experiment = fedavg_synthetic()
    everything, parts = experiment.population.make(0)
    examples, population = experiment.read_clients()
    batches = experiment.open_heldout(experiment.make_preprocess())()
    heldout = np.concatenate([batch["image"][batch["mask"] > 0] for batch in batches])
    chosen = np.concatenate([part[::10] for part in parts])
    np.testing.assert_array_equal(heldout, everything["image"][chosen])
    trained = np.concatenate(population)
    assert len(trained) + len(chosen) == len(examples["label"])
    assert not set(trained) & set(chosen)


def test_a_server_optimizer_without_effect_is_refused() -> None:
    server = ServerConfig(learning_rate=0.5)
    with pytest.raises(ValueError, match="Reptile takes no server optimizer"):
        dataclasses.replace(fedavg_synthetic(), method=Reptile(), server=server)
    with pytest.raises(ValueError, match="trained by FedBuff"):
        dataclasses.replace(fedbuff_digits(), method=FedProx())


def test_an_aggregator_that_a_method_does_not_take_is_refused() -> None:
    def own(loss_fn, *, cohort_size: int, client_optimizer) -> FederatedAlgorithm:
        """Combine updates without an aggregator."""
        return fedavg(loss_fn, cohort_size=cohort_size, client_optimizer=client_optimizer)

    experiment = dataclasses.replace(fedavg_synthetic(), method=method(own))
    for name in ("private_mean", "krum", "coordinate_median"):
        with pytest.raises(ValueError, match=r"no effect: own\(\) has no argument aggregator"):
            dataclasses.replace(experiment, aggregator=aggregator(name))
    # in an experiment of one's own, which checks nothing
    settings = training()._replace(aggregator=aggregator("mean").make(0, 3))
    assert method(own).make(lambda params, batch: (params, {}), settings).init is not None
    settings = settings._replace(aggregator=aggregator("coordinate_median").make(0, 3))
    with pytest.raises(ValueError, match=r"no effect: own\(\) has no argument.*Add the argument"):
        method(own).make(lambda params, batch: (params, {}), settings)


def test_groups_expand_to_experiments_that_are_found_by_name() -> None:
    assert set(GROUPS) >= {"methods_digits", "methods_synthetic", "personal_digits"}
    names = expand_groups(["fedavg_digits", "methods_digits"])
    assert names[0] == "fedavg_digits" and len(names) == 1 + len(METHODS)
    scaffold = find_experiment("methods_digits:scaffold")
    assert scaffold() == find_group("methods_digits").experiments["scaffold"]
    assert "one of the group methods_digits" in scaffold.__doc__
    with pytest.raises(UnknownExperimentError, match="Did you mean scaffold"):
        find_experiment("methods_digits:scafold")
    with pytest.raises(UnknownExperimentError, match="group of 5 experiments"):
        find_experiment("personal_digits")
    with pytest.raises(UnknownExperimentError, match="Did you mean methods_digits"):
        find_experiment("method_digits")


def test_experiments_of_a_group_differ_in_method_aggregator_and_rates_alone() -> None:
    for group in GROUPS:
        first, *others = find_group(group).experiments.values()
        names = ("method", "server", "client_learning_rate", "aggregator")
        fields = {name: getattr(first, name) for name in names}
        assert all(dataclasses.replace(experiment, **fields) == first for experiment in others)
