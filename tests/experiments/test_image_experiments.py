"""Tests of the experiments on images."""

import dataclasses
import itertools
import json

import chex
import jax
import numpy as np
import pytest

from fedpax.experiments import fedavg_images as module
from fedpax.models.classifiers import CNNConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.configuration import from_json
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.cohort_settings import NaturalPopulation, ServerConfig, resolve_clients_axis
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

SMALL = CNNConfig(image_height=8, image_width=8, filters=(4, 4), hidden_dim=8)


def small(experiment, rounds=3, **cohort):
    """Shrink an experiment to seconds, and change fields of its cohort."""
    return dataclasses.replace(
        experiment,
        model=SMALL,
        cohort=dataclasses.replace(experiment.cohort, **cohort),
        training=TrainingConfig(rounds=rounds, evaluate_every=1, checkpoint_every=0),
    )


@pytest.mark.slow
def test_fedavg_learns_digits(tmp_path):
    outcome = train(small(module.fedavg_digits(), rounds=8), tmp_path)
    losses = [line["loss"] for line in select(read_metrics(tmp_path), "evaluation")]
    assert losses[-1] == outcome.evaluation["loss"] < 0.8 * np.log(10)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_clients_of_a_large_population_have_different_data_and_numbers_of_steps(tmp_path):
    experiment = small(module.fedavg_population(), rounds=2, size=32, max_steps=4)
    run = experiment.build()
    assert (run.mesh.size, run.mesh.shape["clients"]) == (8, 8)
    first, second = itertools.islice(run.cohorts, 2)
    assert set(first.client_ids) != set(second.client_ids)
    assert set(first.num_steps) == {1, 2, 3, 4}
    np.testing.assert_array_equal(first.batches["mask"].sum((1, 2)), first.num_examples)
    np.testing.assert_array_equal(first.batches["mask"].any(2).sum(1), first.num_steps)
    labels = [
        np.bincount(label[mask], minlength=10)
        for label, mask in zip(first.batches["label"], first.batches["mask"], strict=True)
    ]
    assert len({np.argmax(count) for count in labels}) > 3
    train(experiment, tmp_path)
    lines = select(read_metrics(tmp_path), "training")
    assert all(0 <= line["input_wait_fraction"] <= 1.01 for line in lines)
    # One all-reduce per round: of the model, the weights and the metrics.
    assert 0 <= lines[0]["bytes_across_placement"] - 4 * SMALL.num_params() < 64


@pytest.mark.slow
def test_each_natural_client_has_the_examples_of_one_value_of_a_field(tmp_path):
    base = module.fedadam_emnist()
    assert (base.cohort.size, base.cohort.batch_size, base.cohort.local_epochs) == (10, 20, 1)
    assert base.model.num_params() == 1_206_590
    experiment = dataclasses.replace(
        small(base, rounds=1), dataset="digits", population=NaturalPopulation(field="label")
    )
    run = experiment.build()
    assert (run.mesh.size, run.mesh.shape["clients"]) == (
        5,
        5,
    )  # of 8 devices; 10 clients share 5 evenly
    cohort = next(run.cohorts)
    for label, mask in zip(cohort.batches["label"], cohort.batches["mask"], strict=True):
        assert len(set(label[mask])) == 1
    assert train(experiment, tmp_path).finished


def with_dropout(experiment):
    model = dataclasses.replace(experiment.model, dropout_rates=(0.25, 0.5))
    return dataclasses.replace(experiment, model=model)


@pytest.mark.parametrize("change", [lambda experiment: experiment, with_dropout])
def test_the_cohort_shapes_of_a_run_match_its_cohorts(change):
    run = change(small(module.fedavg_digits())).build()
    chex.assert_trees_all_equal_shapes_and_dtypes(next(run.cohorts), run.cohort_shapes)


@pytest.mark.slow
def test_the_seeds_of_dropout_decide_a_round():
    run = with_dropout(small(module.fedavg_digits())).build()
    cohort = next(run.cohorts)
    other = cohort._replace(
        batches=cohort.batches | {"dropout_seed": cohort.batches["dropout_seed"] + 1}
    )
    state = run.algorithm.init(jax.jit(run.init)(jax.random.key(0)))
    round_ = jax.jit(run.algorithm.round)
    losses = [float(round_(state, each)[1]["loss"]) for each in (cohort, cohort, other)]
    assert losses[0] == losses[1] != losses[2]


def test_a_run_counts_examples():
    run = small(module.fedavg_digits()).build()
    cohorts = itertools.islice(run.cohorts, 20)
    assert run.item_unit == "examples"
    per_round = np.mean([cohort.batches["mask"].sum() for cohort in cohorts])
    assert run.items_per_round == pytest.approx(per_round, rel=0.2)


def test_cohorts_read_from_files_equal_those_in_memory():
    experiment = small(module.fedavg_digits())
    rounds = [
        next(dataclasses.replace(experiment, in_memory=in_memory).build().cohorts)
        for in_memory in (True, False)
    ]
    chex.assert_trees_all_equal(*rounds)


def test_a_resumed_run_sees_the_cohorts_of_an_unbroken_run():
    made = lambda: small(module.fedavg_population(), size=8).build().cohorts
    unbroken, resumed = made(), made()
    next(unbroken)
    resumed.set_state(json.loads(json.dumps(unbroken.get_state())))
    chex.assert_trees_all_equal(next(unbroken), next(resumed))


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    ("make", "dataset", "words"),
    [
        (
            module.fedavg_digits,
            "stdlib_text",
            "has no field 'image' or 'label', only 'client', 'path', 'text'",
        ),
        (
            module.fedadam_emnist,
            "digits",
            "has no field 'client', only 'image', 'label'. Set --population.field",
        ),
    ],
)
def test_a_data_set_without_the_fields_raises(make, dataset, words, in_memory):
    experiment = dataclasses.replace(small(make()), dataset=dataset, in_memory=in_memory)
    with pytest.raises(ValueError, match=words):
        experiment.build()


@pytest.mark.parametrize(
    ("mesh", "cohort_size", "axis_size"),
    [
        (MeshConfig(clients=-1), 1000, 8),
        (MeshConfig(clients=-1), 10, 5),
        (MeshConfig(clients=-1), 7, 7),
        (MeshConfig(clients=-1, fsdp=2), 10, 2),
        (MeshConfig(clients=2), 10, 2),
        (MeshConfig(clients=-1, fsdp=16), 10, 1),  # more than 8 devices: make() raises
    ],
)
def test_the_clients_axis_is_the_largest_that_divides_the_cohort(mesh, cohort_size, axis_size):
    resolved = resolve_clients_axis(mesh, cohort_size)
    assert (resolved.clients, resolved.fsdp) == (axis_size, mesh.fsdp)


def test_server_optimizers_step_as_their_paper_defines():
    params = {"w": np.ones(3, np.float32)}
    gradient = {"w": np.full(3, 0.5, np.float32)}

    def step(**settings):
        optimizer = ServerConfig(**settings).make()
        return optimizer.update(gradient, optimizer.init(params), params)[0]["w"][0]

    assert step() == pytest.approx(-0.5)  # FedAvg: the pseudo-gradient itself
    assert step(optimizer="sgd", learning_rate=0.1, b1=0.9) == pytest.approx(-0.05)
    # m = (1 - b1) g, and v of Reddi et al., algorithm 2, from v = tau^2.
    adaptive = {"learning_rate": 0.1, "b1": 0.9, "b2": 0.99, "tau": 0.01}
    m, tau2 = 0.1 * 0.5, 0.01**2
    for name, v in {
        "adagrad": tau2 + 0.5**2,
        "adam": 0.99 * tau2 + 0.01 * 0.5**2,
        "yogi": tau2 + 0.01 * 0.5**2,
    }.items():
        expected = -0.1 * m / (v**0.5 + 0.01)
        assert step(optimizer=name, **adaptive) == pytest.approx(expected), name
        # Without b1 it is the paper's, as in `server_adam(rate)`.
        first = 1.0 if name == "adagrad" else 0.1
        del (others := dict(adaptive))["b1"]
        assert step(optimizer=name, **others) == pytest.approx(expected * first / 0.1), name


def test_no_momentum_has_one_form_where_it_is_the_default(tmp_path):
    former = {"class": "fedpax.settings.cohort_settings:ServerConfig", "b1": 0.0}  # config.json
    for name, b1 in {"sgd": None, "adagrad": None, "adam": 0.0, "yogi": 0.0}.items():
        server = from_json({**former, "optimizer": name}, tmp_path)
        assert server == ServerConfig(optimizer=name, b1=0.0) and server.b1 == b1
