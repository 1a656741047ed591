"""Tests that a run of `fedavg_*` resumes on another number of devices with the same cohorts."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from fedpax.checkpoints import load_params
from fedpax.experiments.fedavg_images import FedAvgImages, fedavg_digits, fedavg_population
from fedpax.models.classifiers import CNNConfig
from fedpax.parallel.mesh import default_devices
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig


def small_fedavg_digits(rounds: int) -> FedAvgImages:
    """Make `fedavg_digits` with a tiny network and cohorts that 8, 2 and 1 devices divide."""
    experiment = fedavg_digits()
    return dataclasses.replace(
        experiment,
        model=CNNConfig(image_height=8, image_width=8, filters=(2, 2), hidden_dim=4),
        cohort=dataclasses.replace(experiment.cohort, size=8, local_epochs=1, max_steps=2),
        training=TrainingConfig(rounds=rounds, evaluate_every=0, checkpoint_every=1),
    )


def train_on(num_devices: int, rounds: int, folder: Path) -> None:
    """Train up to a round on the first devices."""
    with default_devices(jax.devices()[:num_devices]):
        train(small_fedavg_digits(rounds), folder)


@pytest.mark.slow
def test_parameters_after_resuming_on_2_and_1_devices_equal_an_unbroken_run(
    tmp_path: Path,
) -> None:
    train_on(8, 6, tmp_path / "unbroken")
    for num_devices, rounds in ((8, 2), (2, 4), (1, 6)):
        train_on(num_devices, rounds, tmp_path / "resumed")
    unbroken, resumed = (load_params(tmp_path / name) for name in ("unbroken", "resumed"))
    chex.assert_trees_all_close(resumed, unbroken, rtol=1e-4, atol=1e-6)
    # The runs are long enough to notice other cohorts: a round moves the parameters much more.
    before = load_params(tmp_path / "resumed", 5)
    moved = max(
        np.max(np.abs(a - b))
        for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(before), strict=True)
    )
    assert moved > 1e-3
    losses = [
        [line["loss"] for line in select(read_metrics(tmp_path / name), "training")]
        for name in ("unbroken", "resumed")
    ]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize(
    "make", [fedavg_digits, pytest.param(fedavg_population, marks=pytest.mark.slow)]
)
def test_the_clients_of_a_round_do_not_depend_on_the_number_of_devices(
    make: Callable[[], FedAvgImages],
) -> None:
    base = make()
    experiment = dataclasses.replace(base, cohort=dataclasses.replace(base.cohort, size=8))
    streams = {}
    for num_devices in (8, 2, 1):
        with default_devices(jax.devices()[:num_devices]):
            streams[num_devices] = experiment.build().cohorts
    for cohorts in itertools.islice(zip(*streams.values(), strict=True), 2):
        clients = [sorted(cohort.client_ids.tolist()) for cohort in cohorts]
        assert clients[0] == clients[1] == clients[2]
    state = json.loads(json.dumps(streams[8].get_state()))
    following = sorted(next(streams[8]).client_ids)
    streams[1].set_state(state)
    assert sorted(next(streams[1]).client_ids) == following
