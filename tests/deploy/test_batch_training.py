"""A run whose rounds are batch jobs equals a run of `fedpax.train`, and each resumes the other."""

import dataclasses
import functools
import os

import jax
import numpy as np
import pytest
from batch_rounds import run_in_a_loop
from hospital_files import write_hospitals
from tracker_server import Server, use

import fedpax
from fedpax.checkpoints import load_params
from fedpax.commands.parts.options import configure
from fedpax.deploy.batch_training import for_workers, open_cohorts, train_in_batches
from fedpax.errors import ConfigurationError
from fedpax.training import read_metrics


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

    tracked = dataclasses.replace(experiment().training, tracker="wandb")
    tracked = dataclasses.replace(experiment(), training=tracked)
    result = train_in_batches(tracked, tmp_path / "batches", run_rounds)
    assert server.lines == read_metrics(tmp_path / "batches")
    assert server.outcomes == ["finished"]
    assert (result.rounds, result.finished, result.rounds_trained) == (3, True, 3)
    assert jobs == [(0, 2), (2, 1)]
    fedpax.train(experiment(), tmp_path / "plain")
    assert_equal_runs(tmp_path / "batches", tmp_path / "plain")
    again = train_in_batches(experiment(), tmp_path / "batches", run_rounds)
    assert (again.rounds, again.rounds_trained) == (3, 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--training.stop_after=2", "training.stop_after=2 has no effect on rounds in batch jobs"),
        ("--training.on_spike=skip", "training.on_spike='skip' has no effect"),
    ],
)
def test_settings_without_effect_are_told(setting, message, tmp_path):
    experiment = configure("fedavg_digits", [setting], None)
    with pytest.raises(ConfigurationError, match=message):
        train_in_batches(experiment, tmp_path / "run", run_in_a_loop)
    assert os.listdir(tmp_path) == []


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
