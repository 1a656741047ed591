"""The evaluation of clients' own models, and the runs of methods for personal models."""

import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.checkpoints.saved_state import load_field, load_params
from fedpax.data import Source, load
from fedpax.experiments import client_experiment
from fedpax.experiments.catalog import find_group
from fedpax.experiments.parts.file_experiments import ServerState
from fedpax.experiments.personal_images import PersonalImages
from fedpax.parallel.mesh import MeshConfig
from fedpax.settings.client_methods import APFL, FedAvg
from fedpax.sites.site_experiment import ClientRange
from fedpax.training.experiment import Run
from fedpax.training.trainer import train


@functools.cache
def small(**fields) -> PersonalImages:
    """Return an experiment of the group, with 12 clients."""
    experiment = find_group("personal_digits").experiments["hypcluster"]
    population = dataclasses.replace(experiment.population, num_clients=12)
    cohort = dataclasses.replace(experiment.cohort, size=4, max_steps=3)
    return dataclasses.replace(experiment, population=population, cohort=cohort, **fields)


@pytest.fixture
def few_examples(monkeypatch) -> None:
    """Let experiments read 400 training and 200 held-out examples, from memory."""
    monkeypatch.setattr(client_experiment, "load", load_few)


@functools.cache
def load_few(name: str, split: str, data_dir: None = None) -> Source:
    source = load(name, split, data_dir=data_dir)
    count = 400 if split == "train" else 200
    return Source(source.name, source.folder, [source[i] for i in range(count)])


def random_params(run: Run, seed: int = 3) -> Any:
    """Return parameters of a run, without the compilation of its initial ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype),
        jax.eval_shape(run.init, jax.random.key(0)),
    )


def scores(experiment: PersonalImages, model: Any, image: Any, label: Any) -> dict[str, Any]:
    """Return the cross-entropy and the correctness of each example, in NumPy."""
    images = image.reshape(-1, *image.shape[-3:])
    logits = np.asarray(experiment.make_model().apply(model, images), np.float64)
    logits = logits.reshape(*label.shape, -1)
    own = np.take_along_axis(logits, np.asarray(label)[..., None], axis=-1)[..., 0]
    loss = np.log(np.sum(np.exp(logits), axis=-1)) - own
    return {"loss": loss, "accuracy": logits.argmax(-1) == label}


def by_hand(experiment: PersonalImages, models: list) -> dict[str, float]:
    """Average over clients, and over the held-out examples of each label that a client has."""
    population, labels = experiment.read_population()
    heldout = experiment.open_heldout(experiment.make_preprocess())()
    image, label, mask = (
        np.concatenate([batch[name] for batch in heldout]) for name in ("image", "label", "mask")
    )
    image, label = image[mask > 0], label[mask > 0]
    totals = {"loss": 0.0, "accuracy": 0.0}
    for model, part in zip(models, population, strict=True):
        result = scores(experiment, model, image, label)
        for own, count in zip(*np.unique(labels[part], return_counts=True), strict=True):
            for name, values in result.items():
                totals[name] += count * values[label == own].mean()
    return {name: total / sum(map(len, population)) for name, total in totals.items()}


def test_each_client_is_evaluated_on_its_labels_by_the_model_that_it_chooses(few_examples):
    experiment = small()
    run = experiment.build()
    params = random_params(run)
    cohort = experiment._read_cohort(experiment.read_population()[0])
    losses = []  # [models, clients]
    for j in range(experiment.method.num_clusters):
        model = jax.tree.map(lambda p, j=j: p[j], params)
        batches, mask = cohort.batches, cohort.batches["mask"]
        result = scores(experiment, model, batches["image"], batches["label"])["loss"]
        of_batches = np.sum(result * mask, axis=-1) / np.maximum(mask.sum(axis=-1), 1)
        losses.append(np.sum(of_batches, axis=-1) / cohort.num_steps)
    chosen = np.empty(12, int)
    chosen[cohort.client_ids] = np.argmin(losses, axis=0)
    assert len(set(chosen)) > 1
    models = [jax.tree.map(lambda p, j=j: p[j], params) for j in chosen]
    check(run.evaluate(params), by_hand(experiment, models))


def test_a_shared_model_is_evaluated_on_all_labels(few_examples):
    experiment = dataclasses.replace(small(), method=FedAvg())
    run = experiment.build()
    params = random_params(run)
    result = experiment.own_model_means()(ServerState(params))
    check(result, by_hand(experiment, [params] * 12))
    assert (
        abs(result["accuracy"] - run.evaluate(params)["accuracy"]) < 0.1
    )  # labels are as frequent


def check(actual: dict[str, float], expected: dict[str, float]) -> None:
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose(*[[x[k] for k in sorted(x)] for x in (actual, expected)], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 4])
def test_clusters_train_and_are_evaluated(clients: int, tmp_path):
    experiment = dataclasses.replace(
        small(), mesh=MeshConfig(clients=clients), client_learning_rate=0.3
    )
    changed = dataclasses.replace(experiment.training, rounds=15, evaluate_every=15)
    outcome = train(dataclasses.replace(experiment, training=changed), tmp_path)
    assert outcome.evaluation["accuracy"] > 0.6  # 0.1 at first


@pytest.mark.slow
def test_training_evaluates_the_models_that_clients_keep(tmp_path):
    # All of a client's mixture is its own model, which starts from the shared one.
    experiment = dataclasses.replace(small(), method=APFL(mixing=1.0), client_learning_rate=0.3)
    changed = dataclasses.replace(experiment.training, rounds=4, evaluate_every=2)
    experiment = dataclasses.replace(experiment, training=changed)
    outcome = train(experiment, tmp_path)
    state = experiment.build().algorithm.init(load_params(tmp_path))
    shared = dataclasses.replace(experiment, method=FedAvg()).own_model_means()(state)
    own = {name: outcome.evaluation[f"personal_{name}"] for name in shared}
    assert own["loss"] < shared["loss"]
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    result = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["round"] for line in result] == [2, 4]
    assert result[-1]["personal_accuracy"] == own["accuracy"]
    store = load_field(tmp_path, "personal")["rows"]["params"]
    kept = [jax.tree.map(lambda p, k=k: p[k], store) for k in range(12)]
    check(own, by_hand(experiment, kept))


def test_models_of_clusters_are_sharded_as_one_model_is(few_examples):
    experiment = small(mesh=MeshConfig(clients=2, tensor=2))
    run = experiment.build()
    alone = dataclasses.replace(experiment, method=FedAvg()).build()
    shapes = jax.eval_shape(run.init, jax.random.key(0))
    for many, actual, leaf in zip(
        *(jax.tree.leaves(r.shardings.params) for r in (run, alone)),
        jax.tree.leaves(shapes),
        strict=True,
    ):
        assert tuple(many.spec) == (None, *actual.spec)
        assert leaf.shape[0] == experiment.method.num_clusters


def test_a_method_with_a_shared_model_has_the_evaluation_of_other_experiments(few_examples):
    experiment = dataclasses.replace(small(), method=APFL())
    run = experiment.build()
    params = random_params(run)
    assert all(leaf.ndim <= 2 for leaf in jax.tree.leaves(params))
    assert 0 <= run.evaluate(params)["accuracy"] <= 1


def test_metrics_by_client_are_those_of_the_own_models(few_examples):
    experiment = small()
    run = experiment.build()
    state = ServerState(random_params(run))
    assert run.evaluate_own_models is not None and run.evaluate_clients is None
    result, together = run.evaluate_own_models(state), experiment.own_model_means()(state)
    assert list(result.names) == [f"client {k}" for k in range(12)]
    for name in ("loss", "accuracy"):
        mean = np.average(result.metrics[name], weights=result.num_examples)
        assert mean == pytest.approx(together[name], rel=1e-4)
    areas = result.metrics["auc"]
    assert ((areas >= 0) & (areas <= 1) | np.isnan(areas)).all() and np.isfinite(areas).any()


@pytest.mark.usefixtures("few_examples")
def test_a_site_of_clusters_is_weighed_by_its_training_examples() -> None:
    """As a client is in `own_model_means`: the held-out examples of all sites are the same."""
    site = small().at_site(ClientRange(3, 12, 20))
    assert site.num_heldout == 400 and site.evaluate is not None and site.fine_tune is None
    run = small().build()
    params = random_params(run)
    assert site.evaluate(params) == pytest.approx(run.evaluate(params), rel=1e-6)
    shared = dataclasses.replace(small(), method=FedAvg()).at_site(ClientRange(3, 12, 20))
    assert shared.num_heldout == 200
