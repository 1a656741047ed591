"""Experiments with the settings of papers, on data sets that are downloaded."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_archives import serialize, write_archive

from fedpax.experiments.fedavg_characters import fedyogi_shakespeare
from fedpax.experiments.fedavg_images import fedadam_emnist, fedyogi_cifar100
from fedpax.models.losses import classification_loss
from fedpax.run_files.metrics import read_metrics, select
from fedpax.sources.federated_archive import Archive
from fedpax.sources.federated_sources import FederatedCifar100, FederatedShakespeare
from fedpax.training.trainer import train


@pytest.mark.parametrize(
    ("make", "archive"),
    [
        (fedadam_emnist, "emnist_all"),
        (fedyogi_cifar100, "cifar100"),
        (fedyogi_shakespeare, "shakespeare"),
    ],
)
def test_without_a_network_the_error_names_the_archive_and_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], archive: str
) -> None:
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # a port without a listener
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    experiment = dataclasses.replace(make(), data_dir=str(tmp_path))
    words = rf"cannot be reached\. Put https://.*/{archive}\S* into {tmp_path}/downloads/manual"
    with pytest.raises(ConnectionError, match=words):
        experiment.build()


def test_crops_of_another_size_than_the_network_takes_raise() -> None:
    words = r"crop_size=24, expected .* 28 x 28\. Set --model\.image_height=24 and "
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(fedadam_emnist(), crop_size=24)


@pytest.mark.parametrize(
    ("make", "shape", "classes"),
    [(fedadam_emnist, (28, 28, 1), 62), (fedyogi_cifar100, (32, 32, 3), 100)],
)
def test_the_network_takes_the_images_of_the_data_set(
    make: Callable[[], Any], shape: tuple[int, ...], classes: int
) -> None:
    model = make().make_model()
    params = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((20, *shape), jnp.uint8)
    assert jax.eval_shape(model.apply, params, images).shape == (20, classes)
    batch = {"image": images, "label": jax.ShapeDtypeStruct((20,), jnp.int32)}
    loss, _ = jax.eval_shape(classification_loss(model.apply), params, batch)
    assert loss.shape == ()


@pytest.mark.slow
def test_a_round_on_images_of_the_shape_of_cifar100(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published experiment with a ResNet of fewer filters, on an archive of random images."""
    rng, archive = np.random.default_rng(0), FederatedCifar100.ARCHIVE
    rows = [
        (split, client, serialize({"image": image.ravel(), "label": label, "coarse_label": 3}))
        for split in ("train", "test")
        for client in ("0", "1", "2")
        for label in (7, 98)
        for image in rng.integers(0, 256, (3, 32, 32, 3))
    ]
    write_archive(tmp_path / "downloads" / "manual" / archive.filename, rows)
    monkeypatch.setattr(FederatedCifar100, "ARCHIVE", Archive(archive.url))
    base = fedyogi_cifar100()
    experiment = dataclasses.replace(
        base,
        data_dir=str(tmp_path),
        model=dataclasses.replace(base.model, filters=4),
        cohort=dataclasses.replace(base.cohort, size=2, batch_size=3),
        training=dataclasses.replace(base.training, rounds=2, evaluate_every=1),
    )
    train(experiment, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert [line["loss"] > 0 for line in select(lines, "training")] == [True, True]
    accuracies = [line["accuracy"] for line in select(lines, "evaluation")]
    assert len(accuracies) >= 2 and all(0 <= accuracy <= 1 for accuracy in accuracies)


@pytest.mark.slow
def test_fedyogi_learns_characters_of_snippets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published experiment, with a small network, on an archive of repeated lines."""
    rng, archive = np.random.default_rng(0), FederatedShakespeare.ARCHIVE
    line = b"To be, or not to be, that is the question:\n"
    rows = [
        (split, f"HAMLET_{k}", serialize({"snippets": (line * 9)[start : start + length]}))
        for split in ("train", "test")
        for k in range(4)
        for start, length in zip(rng.integers(40, size=6), rng.integers(1, 300, 6), strict=True)
    ]
    write_archive(tmp_path / "downloads" / "manual" / archive.filename, rows)
    monkeypatch.setattr(FederatedShakespeare, "ARCHIVE", Archive(archive.url))
    base = fedyogi_shakespeare()
    experiment = dataclasses.replace(
        base,
        data_dir=str(tmp_path),
        model=dataclasses.replace(base.model, hidden_dim=16),
        heldout_batch_size=8,
        cohort=dataclasses.replace(base.cohort, size=2, max_steps=4),
        training=dataclasses.replace(base.training, rounds=20, evaluate_every=20),
    )
    rows = experiment.read_clients()[0]["rows"]
    population, _ = experiment.read_population()
    assert sorted(np.concatenate(population)) == list(range(len(rows)))
    train(experiment, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    losses = [line["loss"] for line in select(lines, "training")]
    assert losses[-1] < losses[0] - 0.8
    (*_, last) = select(lines, "evaluation")
    assert 0.05 < last["accuracy"] <= 1


def test_the_network_of_shakespeare_has_an_output_for_each_character() -> None:
    base = fedyogi_shakespeare()
    assert base.model.num_params() == 820_522
    with pytest.raises(ValueError, match=r"86 characters and 4 special tokens. Set --model\.voc"):
        dataclasses.replace(base, model=dataclasses.replace(base.model, vocab_size=86))
