"""The experiments on images build and train as they claim to."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from fedpax.experiments import fedavg_images as module
from fedpax.models.classifiers import CNNConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.experiment import TrainingConfig
from fedpax.training.metrics import read_metrics, select
from fedpax.training.trainer import train

SMALL = CNNConfig(image_height=8, image_width=8, filters=(4, 4), hidden_dim=8)


def small(experiment, rounds=3, **cohort):
    return dataclasses.replace(
        experiment,
        model=SMALL,
        cohort=dataclasses.replace(experiment.cohort, **cohort),
        training=TrainingConfig(rounds=rounds, evaluate_every=1, checkpoint_every=0),
    )


def test_digits_are_learned(tmp_path):
    outcome = train(small(module.fedavg_digits(), rounds=8), tmp_path)
    losses = [line["loss"] for line in select(read_metrics(tmp_path), "evaluation")]
    assert losses[-1] == outcome.evaluation["loss"] < 0.8 * np.log(10)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_clients_of_a_large_population_differ_and_cost_their_own_steps(tmp_path):
    experiment = small(module.fedavg_population(), rounds=2, size=32, max_steps=4)
    run = experiment.build()
    assert (run.mesh.size, run.mesh.shape["clients"]) == (8, 8)
    first, second = itertools.islice(run.cohorts, 2)
    assert set(first.clients) != set(second.clients)
    assert set(first.steps) == {1, 2, 3, 4}
    np.testing.assert_array_equal(first.batches["mask"].sum((1, 2)), first.weights)
    np.testing.assert_array_equal(first.batches["mask"].any(2).sum(1), first.steps)
    labels = [
        np.bincount(label[mask], minlength=10)
        for label, mask in zip(first.batches["label"], first.batches["mask"], strict=True)
    ]
    assert len({np.argmax(count) for count in labels}) > 3
    train(experiment, tmp_path)
    lines = select(read_metrics(tmp_path), "training")
    assert all(0 <= line["input_wait_fraction"] <= 1.01 for line in lines)
    # All that crosses is one sum: of the model, the weights and the metrics.
    assert 0 <= lines[0]["bytes_across_placement"] - 4 * SMALL.num_params() < 64


@pytest.mark.slow
def test_natural_clients_are_the_values_of_a_field(tmp_path):
    base = module.fedadam_emnist()
    assert (base.cohort.size, base.cohort.batch, base.cohort.epochs) == (10, 20, 1)
    assert base.model.num_params() == 1_206_590
    experiment = dataclasses.replace(small(base, rounds=1), dataset="digits", field="label")
    run = experiment.build()
    assert (run.mesh.size, run.mesh.shape["clients"]) == (5, 5)  # of 8 devices; 10 clients share 5 evenly
    cohort = next(run.cohorts)
    for label, mask in zip(cohort.batches["label"], cohort.batches["mask"], strict=True):
        assert len(set(label[mask])) == 1
    assert train(experiment, tmp_path).finished


def test_the_shapes_of_a_round_are_known_before_it_is_drawn():
    run = small(module.fedavg_digits()).build()
    drawn = next(run.cohorts)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), drawn) == jax.tree.map(
        lambda x: (x.shape, x.dtype), run.cohort_shapes
    )


def test_a_round_in_memory_is_the_round_from_files():
    experiment = small(module.fedavg_digits())
    rounds = [
        next(dataclasses.replace(experiment, in_memory=in_memory).build().batches)
        for in_memory in (True, False)
    ]
    jax.tree.map(np.testing.assert_array_equal, *rounds)


def test_a_run_goes_on_with_the_cohorts_that_it_would_have_had(tmp_path):
    made = lambda: small(module.fedavg_population(), size=8).build().batches
    unbroken, resumed = made(), made()
    next(unbroken)
    resumed.set_state(json.loads(json.dumps(unbroken.get_state())))
    jax.tree.map(np.testing.assert_array_equal, next(unbroken), next(resumed))


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    ("make", "dataset", "words"),
    [
        (
            module.fedavg_digits,
            "stdlib_text",
            "stdlib_text has no field 'image' or 'label', but 'client', 'path', 'text'",
        ),
        (module.fedadam_emnist, "digits", "digits has no field 'client', but 'image', 'label'"),
    ],
)
def test_a_data_set_without_the_fields_is_refused(make, dataset, words, in_memory):
    experiment = dataclasses.replace(small(make()), dataset=dataset, in_memory=in_memory)
    with pytest.raises(ValueError, match=words):
        experiment.build()


@pytest.mark.parametrize(
    ("mesh", "clients", "wanted"),
    [
        (MeshConfig(clients=-1), 1000, 8),
        (MeshConfig(clients=-1), 10, 5),
        (MeshConfig(clients=-1), 7, 7),
        (MeshConfig(clients=-1, fsdp=2), 10, 2),
        (MeshConfig(clients=2), 10, 2),
        (MeshConfig(clients=-1, fsdp=16), 10, 1),  # whose making says what is missing
    ],
)
def test_the_clients_axis_shares_the_cohort_evenly(mesh, clients, wanted):
    shared = module.sharing(mesh, clients)
    assert (shared.clients, shared.fsdp) == (wanted, mesh.fsdp)


def test_server_optimizers():
    params = {"w": np.ones(3, np.float32)}
    gradient = {"w": np.full(3, 0.5, np.float32)}

    def step(**settings):
        optimizer = module.ServerConfig(**settings).make()
        return optimizer.update(gradient, optimizer.init(params), params)[0]["w"][0]

    assert step() == pytest.approx(-0.5)  # FedAvg: the pseudo-gradient itself
    assert step(optimizer="sgd", learning_rate=0.1, b1=0.9) == pytest.approx(-0.05)
    assert step(optimizer="adam", learning_rate=0.1, b1=0.9) == pytest.approx(-0.1, rel=0.01)
    assert step(optimizer="yogi", learning_rate=0.1, b1=0.9) < 0
