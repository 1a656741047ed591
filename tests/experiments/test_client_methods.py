"""The methods for clients as experiments, and the groups of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort
from fedpax.algorithms import fedprox
from fedpax.experiments.catalog import (
    UnknownExperimentError,
    expand_groups,
    find_experiment,
    find_group,
    groups,
)
from fedpax.experiments.client_methods import ClientTraining, FedProx, Reptile
from fedpax.experiments.fedavg_clients import ServerConfig
from fedpax.experiments.fedavg_synthetic import fedavg_leaf_synthetic, fedavg_synthetic
from fedpax.experiments.fedbuff_images import fedbuff_digits
from fedpax.experiments.methods import METHODS, PERSONAL_METHODS
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
    experiment = dataclasses.replace(fedavg_synthetic(), **ALL[name])
    algorithm = experiment.method.make(loss_fn, training(experiment.server))
    state = jax.eval_shape(algorithm.init, jnp.zeros(5))
    after, metrics = jax.eval_shape(algorithm.round, state, COHORT)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert metrics["loss"].shape == ()


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
    results = [one.round(one.init(jnp.zeros(5)), COHORT)[0].params for one in (made, by_hand)]
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["personal_digits:apfl", "methods_synthetic:agnostic"])
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


def test_groups_expand_to_experiments_that_are_found_by_name() -> None:
    assert set(groups()) >= {"methods_digits", "methods_synthetic", "personal_digits"}
    names = expand_groups(["fedavg_digits", "methods_digits"])
    assert names[0] == "fedavg_digits" and len(names) == 1 + len(METHODS)
    scaffold = find_experiment("methods_digits:scaffold")
    assert scaffold() == find_group("methods_digits").experiments["scaffold"]
    assert "one of the group methods_digits" in scaffold.__doc__
    with pytest.raises(UnknownExperimentError, match="Did you mean scaffold"):
        find_experiment("methods_digits:scafold")
    with pytest.raises(UnknownExperimentError, match="group of 4 experiments"):
        find_experiment("personal_digits")
    with pytest.raises(UnknownExperimentError, match="Did you mean methods_digits"):
        find_experiment("method_digits")


def test_experiments_of_a_group_differ_in_method_server_and_client_rate_alone() -> None:
    for group in groups():
        found = list(find_group(group).experiments.values())
        fields = {"method": found[0].method, "server": found[0].server}
        rate = {"client_learning_rate": found[0].client_learning_rate}
        assert {dataclasses.replace(one, **fields, **rate) for one in found} == {found[0]}
