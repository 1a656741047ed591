"""Runs that begin from the model of another run."""

import dataclasses
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from small_regression import ModelConfig, Regression, shared_compilation, single_client

from fedpax.checkpoints.saved_state import load_params
from fedpax.errors import ConfigurationError
from fedpax.training.experiment import StoredParams
from fedpax.training.trainer import begin_from, train


def experiment(rounds: int, begin_from: Path | None = None) -> Regression:
    base = single_client()
    where = None if begin_from is None else str(begin_from)
    training = dataclasses.replace(base.training, rounds=rounds, begin_from=where)
    return dataclasses.replace(base, training=training)


def test_a_run_begins_from_the_newest_model_of_another_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with shared_compilation():
        train(experiment(3), first)
        train(experiment(1, first), second)
    run = experiment(1).build()
    with jax.set_mesh(run.mesh):
        state = run.algorithm.init(load_params(first))
        state, _ = jax.jit(run.algorithm.round)(state, next(run.cohorts))
    chex.assert_trees_all_close(load_params(second), jax.device_get(state.params), rtol=1e-5)
    with pytest.raises(AssertionError):  # one round from other parameters differs
        chex.assert_trees_all_close(load_params(second), load_params(first), rtol=1e-3)


@pytest.mark.slow
def test_a_run_that_resumes_does_not_need_the_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with shared_compilation():
        train(experiment(1), first)
        train(experiment(1, first), second)
        assert f"reading the initial parameters, training.begin_from={first}" in (
            capsys.readouterr().err
        )
        shutil.rmtree(first)
        train(experiment(2, first), second)
    assert f"not reading training.begin_from={first} again" in capsys.readouterr().err


def test_a_missing_run_or_another_model_is_refused(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    with pytest.raises(ConfigurationError, match=f"training.begin_from={empty}: .* Train there"):
        train(experiment(1, empty), tmp_path / "run")
    wider = dataclasses.replace(experiment(1), model=ModelConfig(hidden=64))
    train(wider, other)
    with pytest.raises(ConfigurationError, match=f"training.begin_from={other}: .*hidden"):
        train(experiment(1, other), tmp_path / "run")


def test_two_kinds_of_initial_parameters_are_refused() -> None:
    weights = StoredParams("model.weights=folder", {}, lambda: {"w": np.zeros(2)})
    run = experiment(1).build()._replace(initial=weights)
    assert begin_from(run, None) is run
    with pytest.raises(ConfigurationError, match=r"and model\.weights=folder are given"):
        begin_from(run, "runs/other")
