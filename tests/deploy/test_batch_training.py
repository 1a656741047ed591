"""A run whose rounds are batch jobs equals a run of `fedpax.train`, and each resumes the other."""

import dataclasses
import errno
import functools
import os
import pickle

import jax
import numpy as np
import pytest
from batch_rounds import run_in_a_loop
from hospital_files import write_hospitals
from tracker_server import Server, use

import fedpax
from fedpax.checkpoints import load_params
from fedpax.checkpoints.checkpoint_files import DamagedCheckpointError
from fedpax.commands.parts.options import configure
from fedpax.deploy.batch_training import (
    for_workers,
    open_cohorts,
    open_heldout,
    train_in_batches,
)
from fedpax.errors import ConfigurationError
from fedpax.training import read_metrics, select
from fedpax.training.round_logger import NonFiniteError
from fedpax.training.trainer import StorageError


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    arguments = write_hospitals(tmp_path_factory.mktemp("hospitals"))
    return functools.partial(
        configure,
        "fedavg_table",
        [
            *arguments[1:],
            "--data.label=outcome",
            "--training.evaluate_every=2",
            "--training.checkpoint_every=2",
        ],
        None,
    )


def lines(folder):
    keys = ("kind", "round", "loss", "accuracy", "items")
    return [{k: line.get(k) for k in keys} for line in read_metrics(folder)]


def assert_equal_runs(one, other):
    for first, second in zip(lines(one), lines(other), strict=True):
        assert (first["kind"], first["round"], first["items"]) == (
            second["kind"],
            second["round"],
            second["items"],
        )
        for name in ("loss", "accuracy"):
            assert (first[name] is None) == (second[name] is None)
            if first[name] is not None:
                np.testing.assert_allclose(first[name], second[name], rtol=0, atol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6),
        load_params(one),
        load_params(other),
    )


def test_a_run_equals_that_of_train_and_resumes_it(experiment, tmp_path, monkeypatch):
    jobs, server = [], use(monkeypatch, Server())

    def run_rounds(program, state, **settings):
        jobs.append((settings["first_round"], settings["rounds"]))
        return run_in_a_loop(program, state, **settings)

    with_norm = dataclasses.replace(experiment().training, update_norm=True)
    plain = dataclasses.replace(experiment(), training=with_norm)
    tracked = dataclasses.replace(with_norm, tracker="wandb")
    tracked = dataclasses.replace(experiment(), training=tracked)
    result = train_in_batches(tracked, tmp_path / "batches", run_rounds)
    assert server.lines == read_metrics(tmp_path / "batches")
    assert server.outcomes == ["finished"]
    assert (result.rounds, result.finished, result.rounds_trained) == (3, True, 3)
    assert jobs == [(0, 2), (2, 1)]
    fedpax.train(plain, tmp_path / "plain")
    assert_equal_runs(tmp_path / "batches", tmp_path / "plain")
    batches, others = (
        [line["update_norm"] for line in read_metrics(tmp_path / name) if "update_norm" in line]
        for name in ("batches", "plain")
    )
    assert len(batches) == 3
    np.testing.assert_allclose(batches, others, rtol=1e-5)
    again = train_in_batches(plain, tmp_path / "batches", run_rounds)
    assert (again.rounds, again.rounds_trained) == (3, 0)


def test_the_rows_of_a_store_divide_by_five_devices(experiment, tmp_path):
    name, settings, _ = experiment.args
    settings = [*settings, "--method=scaffold", "--cohort.size=5"]
    make = functools.partial(configure, name, settings, None)
    train_in_batches(make(), tmp_path / "batches", run_in_a_loop)
    fedpax.train(make(), tmp_path / "plain")
    assert_equal_runs(tmp_path / "batches", tmp_path / "plain")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--training.stop_after=2", "training.stop_after=2 has no effect on rounds in batch jobs"),
        ("--training.on_spike=skip", "training.on_spike='skip' has no effect"),
        ("--training.profile_at=2:3", "training.profile_at='2:3' has no effect"),
        ("--training.hang_after=60", r"training.hang_after=60.0 has no effect .*expected 1800.0"),
    ],
)
def test_settings_without_effect_are_told(setting, message, tmp_path):
    experiment = configure("fedavg_digits", [setting], None)
    with pytest.raises(ConfigurationError, match=message):
        train_in_batches(experiment, tmp_path / "run", run_in_a_loop)
    assert os.listdir(tmp_path) == []


def test_a_run_without_shapes_of_cohorts_names_the_field(experiment, tmp_path, monkeypatch):
    build = type(experiment()).build
    monkeypatch.setattr(
        type(experiment()), "build", lambda self: build(self)._replace(cohort_shapes=None)
    )
    with pytest.raises(ConfigurationError, match=r"Set Run\.cohort_shapes in build\(\), as docs"):
        train_in_batches(experiment(), tmp_path / "run", run_in_a_loop)


def test_a_round_without_clients_has_no_loss(experiment, tmp_path):
    def sampled():
        few = experiment()
        training = dataclasses.replace(few.training, rounds=8, evaluate_every=0, checkpoint_every=8)
        cohort = dataclasses.replace(few.cohort, sampling_probability=0.1)
        return dataclasses.replace(few, training=training, cohort=cohort)

    train_in_batches(sampled(), tmp_path / "batches", run_in_a_loop)
    fedpax.train(sampled(), tmp_path / "plain")
    batches, plain = (
        [line["loss"] for line in select(read_metrics(tmp_path / name), "training")]
        for name in ("batches", "plain")
    )
    assert [loss is None for loss in batches] == [loss is None for loss in plain]
    assert 0 < sum(loss is None for loss in batches) < 8


def test_a_job_that_diverges_says_what_is_kept(experiment, tmp_path):
    def turn_non_finite(program, state, **settings):
        results = run_in_a_loop(program, state, **settings)
        if settings["first_round"] == 0:
            return results
        return [(state, metrics | {"loss": np.float32(np.nan)}) for state, metrics in results]

    with pytest.raises(
        NonFiniteError, match=r"The checkpoint of round 2 is kept in .* Start again"
    ):
        train_in_batches(experiment(), tmp_path / "run", turn_non_finite)


def test_a_full_disk_says_what_is_kept(experiment, tmp_path):
    def fill_disk(program, state, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match=r"No space left on device\. No checkpoint is kept in"):
        train_in_batches(experiment(), tmp_path / "run", fill_disk)


def test_a_finished_run_whose_checkpoint_is_damaged_is_told(experiment, tmp_path):
    short = dataclasses.replace(experiment().training, rounds=1)
    short = dataclasses.replace(experiment(), training=short)
    train_in_batches(short, tmp_path / "run", run_in_a_loop)
    (tmp_path / "run" / "checkpoints" / "1" / "checksums.json").write_text("{")
    with pytest.raises(DamagedCheckpointError):
        train_in_batches(short, tmp_path / "run", run_in_a_loop)


def test_cohorts_that_are_made_as_a_whole_are_told():
    experiment = configure("diloco_text", [], None)
    with pytest.raises(ConfigurationError, match=r"cannot be read one by one.*cohort_rounds"):
        open_cohorts(experiment)


def test_workers_get_an_experiment_without_its_data(experiment, tmp_path):
    opened = experiment()
    opened.build()
    assert "opened" in opened.__dict__
    fresh = for_workers(opened, tmp_path)
    assert fresh == opened and "opened" not in fresh.__dict__ and "prepared" not in fresh.__dict__


@pytest.mark.parametrize("open_clients", [open_cohorts, open_heldout])
def test_an_opened_job_is_pickled_without_its_data(open_clients, experiment, tmp_path):
    """An engine opens clients before it pickles the function, once for each step of a job."""
    opened = experiment()
    opened.write_configuration(tmp_path, "fedavg_table")
    clients = functools.partial(open_clients, for_workers(opened, tmp_path))
    before = pickle.dumps(clients)
    first = clients()
    assert pickle.dumps(clients) == before
    ids = first.client_ids(0)
    jax.tree.map(
        np.testing.assert_array_equal,
        pickle.loads(before)().read_clients(0, ids),
        first.read_clients(0, ids),
    )
