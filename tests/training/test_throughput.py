"""The throughput of a run, and the fraction of time that waits for input."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from small_regression import Regression, regression

from fedpax.checkpoints import checkpoint
from fedpax.checkpoints.orbax_files import open_checkpoints
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.exchanged_bytes import tree_bytes
from fedpax.training.experiment import Experiment, Run
from fedpax.training.trainer import train
from fedpax.training.training_config import is_due, last_due_before


def settings(experiment: Regression, **changes: Any) -> Regression:
    training = dataclasses.replace(experiment.training, **changes)
    return dataclasses.replace(experiment, training=training)


@dataclasses.dataclass(frozen=True)
class SlowEvaluation(Regression):
    """Evaluates slowly, and fails if its round is traced again after it was compiled."""

    def build(self) -> Run:
        run = super().build()

        def evaluate(params: Any) -> dict[str, float]:
            time.sleep(0.3)
            return run.evaluate(params)

        # jax.eval_shape and lowering share one trace.
        round = chex.assert_max_traces(run.algorithm.round, n=1)
        return run._replace(evaluate=evaluate, algorithm=run.algorithm._replace(round=round))


def test_throughput_excludes_evaluation_and_the_round_is_traced_once(tmp_path: Path) -> None:
    base = settings(regression(), evaluate_every=1, rounds=5)
    experiment: Experiment = SlowEvaluation(training=base.training, mesh=base.mesh)
    train(experiment, tmp_path)
    training = select(read_metrics(tmp_path), "training")
    elapsed = training[-1]["wall_seconds"] - training[0]["wall_seconds"]
    assert elapsed >= 4 * 0.3 + sum(line["seconds"] for line in training[1:])


def test_throughput_and_steps_exclude_the_opening_of_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(2.0)
        return open_checkpoints(*arguments, **options)

    monkeypatch.setattr(checkpoint, "open_checkpoints", open_slowly)
    train(settings(regression(), evaluate_every=0, checkpoint_every=0, rounds=4), tmp_path)
    training = select(read_metrics(tmp_path), "training")
    assert sum(line["seconds"] for line in training[1:]) < 2.0
    assert training[-1]["step_seconds"] < 2.0 <= training[-1]["save_seconds"]


@dataclasses.dataclass(frozen=True)
class SlowInput(Regression):
    """Draws a cohort slowly."""

    seconds: float = 0.2

    def build(self) -> Run:
        run = super().build()
        draw = type(run.cohorts).__next__

        class Slow(type(run.cohorts)):
            def __next__(slow) -> Any:
                time.sleep(self.seconds)
                return draw(slow)

        run.cohorts.__class__ = Slow
        return run


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_the_fraction_of_time_that_waits_for_input_is_recorded(
    tmp_path: Path, seconds: float
) -> None:
    base = settings(regression(), evaluate_every=0, checkpoint_every=0, rounds=6)
    experiment = SlowInput(training=base.training, mesh=base.mesh, seconds=seconds)
    train(experiment, tmp_path)
    lines = select(read_metrics(tmp_path), "training")[
        1:-1
    ]  # after the last round there is no input
    waited = sum(line["input_wait_fraction"] * line["seconds"] for line in lines)
    elapsed = sum(line["seconds"] for line in lines)
    if seconds:
        assert 0.7 * elapsed < waited <= elapsed
    else:
        assert waited < 0.7 * elapsed


class Evaluated(SlowInput):
    """Rounds that take longer than drawing the next cohort."""

    def build(self) -> Run:
        run = super().build()

        def round(state: Any, batches: Any) -> Any:
            state, metrics = run.algorithm.round(state, batches)

            def wait(loss: Any) -> Any:
                time.sleep(2 * self.seconds)
                return loss

            shape = jax.ShapeDtypeStruct((), metrics["loss"].dtype)
            return state, metrics | {"loss": jax.pure_callback(wait, shape, metrics["loss"])}

        return run._replace(algorithm=run.algorithm._replace(round=round))


@pytest.mark.slow
def test_waiting_while_the_devices_work_is_not_counted(tmp_path: Path) -> None:
    """After an evaluation two rounds start at once, and the second cohort is not drawn yet."""
    base = settings(regression(), evaluate_every=2, checkpoint_every=0, rounds=6)
    experiment = Evaluated(training=base.training, mesh=base.mesh, seconds=0.2)
    train(experiment, tmp_path)
    lines = select(read_metrics(tmp_path), "training")[2:]
    idle = sum(line["input_wait_fraction"] * line["seconds"] for line in lines)
    assert idle < 0.1 * sum(line["seconds"] for line in lines)


def test_rounds_after_which_a_run_evaluates() -> None:
    assert [number for number in range(1, 12) if is_due(number, 11, 5, 4)] == [4, 5, 8, 10, 11]
    assert (last_due_before(10, 5, 4), last_due_before(4, 5, 4)) == (8, 0)


def test_bytes_of_a_tree() -> None:
    assert tree_bytes({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}) == 28
