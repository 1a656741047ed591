"""`fedpax.train`: experiments that a notebook's cell defines."""

import dataclasses
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_runs import Command

import fedpax
from fedpax.errors import ConfigurationError
from fedpax.main import main
from fedpax.preemption import PreemptionGuard
from fedpax.training import trainer

CELL = """\
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedpax
from fedpax.algorithms import fedavg
from fedpax.data import FunctionRounds
from fedpax.training.experiment import Experiment, Run
from fedpax.training.training_config import TrainingConfig


class Weights(NamedTuple):
    w: jax.Array
    pair: tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(Experiment):
    optimizer: Optimizer = Optimizer()
    scale: Any = 1.0

    def build(self):
        def loss_fn(params, x):
            return jnp.mean((params.w + params.pair[0] - params.pair[1] - x) ** 2), {}

        cohort = fedpax.Cohort(np.ones((2, 1, 4), np.float32))
        return Run(
            algorithm=fedavg(
                loss_fn, cohort_size=2, client_optimizer=optax.sgd(self.optimizer.learning_rate)
            ),
            init=lambda key: Weights(jnp.zeros(()), (jnp.zeros(()), jnp.zeros(()))),
            cohorts=FunctionRounds(lambda number: cohort),
            evaluate=lambda params: {"loss": loss_fn(params, jnp.ones(4))[0]},
            mesh=self.mesh.make(jax.devices()[:1]),
            items_per_round=8,
            placement="clients",
        )


def line():
    return Line(training=TrainingConfig(rounds=2, evaluate_every=1, checkpoint_every=1))
"""


def run_cell() -> dict[str, Any]:
    """Return what a notebook knows after its cell ran: classes of the module __main__."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, names)
    return names


def extended(experiment: Any, rounds: int) -> Any:
    training = dataclasses.replace(experiment.training, rounds=rounds)
    return dataclasses.replace(experiment, training=training)


@pytest.fixture
def job_log_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_an_experiment_of_a_cell_trains_resumes_and_returns_its_model(
    job_log_dir: Path, run: Command, tmp_path: Path
) -> None:
    first = fedpax.train(run_cell()["line"](), job_log_dir)
    assert (first.rounds, first.folder) == (2, job_log_dir)
    assert isinstance(first.evaluation, dict) and type(first.evaluation["loss"]) is float
    assert [line["round"] for line in first.metrics if line["kind"] == "training"] == [1, 2]
    assert type(first.params).__name__ == "Weights" and isinstance(first.params.pair, tuple)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(first.params))

    # The cell is run again: its classes are other ones of the same names.
    names = run_cell()
    assert fedpax.train(names["line"](), job_log_dir).evaluation == first.evaluation
    longer = extended(names["line"](), 4)
    second = fedpax.train(longer, job_log_dir)
    assert second.rounds == 4 and second.evaluation["loss"] < first.evaluation["loss"]

    (panel,) = second.plot().axes
    held_out = [line["loss"] for line in second.metrics if line["kind"] == "evaluation"]
    assert any(list(line.get_ydata()) == held_out for line in panel.lines)

    other = dataclasses.replace(longer, optimizer=names["Optimizer"](0.2))
    with pytest.raises(ConfigurationError, match=r"optimizer.learning_rate: 0.1 -> 0.2") as told:
        fedpax.train(other, job_log_dir)
    # In Python's words; the flags are for the command line.
    remedy = r"another job_log_dir to start.* allow_config_change=\['optimizer.learning_rate'\] to"
    assert re.search(remedy, str(told.value)) and "--" not in str(told.value)
    assert "--allow_config_change=optimizer.learning_rate" in told.value.in_flags
    with pytest.raises(ConfigurationError, match=r"^allow_config_change=\['rate'\] names no field"):
        fedpax.train(other, job_log_dir, allow_config_change=["rate"])
    allowed = fedpax.train(extended(other, 5), job_log_dir, allow_config_change=["optimizer"])
    assert allowed.rounds == 5

    status, output, _ = run("show", f"--job_log_dir={job_log_dir}")
    assert status == 0 and "5/5" in output
    for command in (["evaluate"], ["export", f"--out={tmp_path / 'out'}"]):
        status, _, errors = run(*command, f"--job_log_dir={job_log_dir}")
        assert status == 2
        assert "__main__:Line, which a notebook or a script defined" in errors
        assert "load_params" in errors and "--exp=path/to/file.py:function" in errors
    # Saved in a file, the same code reads the run, and trains on.
    (tmp_path / "saved_cell.py").write_text(CELL)
    named = [f"--exp={tmp_path / 'saved_cell.py'}:line", f"--job_log_dir={job_log_dir}"]
    status, output, _ = run("evaluate", *named, f"--json={tmp_path / 'metrics.json'}")
    metrics = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert metrics == allowed.evaluation  # though evaluate returns an array
    assert status == 0 and f"{allowed.evaluation['loss']:.4f}" in output
    changed = ["--optimizer.learning_rate=0.2", "--training.rounds=6"]
    assert run("train", *named, *changed)[0] == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda names: names["line"], "got the function line.*Pass its result: line()"),
        (lambda names: names["Line"], "got the class Line.*Make an instance: Line"),
        (lambda names: "fedavg_digits", "got 'fedavg_digits'.*find_experiment"),
        (lambda names: names["line"]().training, "got a TrainingConfig.*Pass an instance"),
    ],
)
def test_what_is_no_experiment_is_named(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        fedpax.train(make(run_cell()), "unused")


def test_a_field_that_cannot_be_stored_is_named(job_log_dir: Path) -> None:
    names = run_cell()
    experiment = dataclasses.replace(names["line"](), scale=np.float32(2))
    with pytest.raises(ConfigurationError, match=r"scale = .* is a float32, expected an int"):
        fedpax.train(experiment, job_log_dir)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_saves_and_is_raised_again(
    number: signal.Signals,
    error: type[BaseException],
    job_log_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SignalAfterOneRound(PreemptionGuard):
        def should_stop(self, round_number: int) -> bool:
            if round_number == 1:
                signal.raise_signal(number)
            return super().should_stop(round_number)

    monkeypatch.setattr(trainer, "PreemptionGuard", SignalAfterOneRound)
    with pytest.raises(error):
        fedpax.train(run_cell()["line"](), job_log_dir)
    monkeypatch.undo()
    assert fedpax.train(run_cell()["line"](), job_log_dir).rounds == 2


def test_main_names_the_function_for_objects(capsys: pytest.CaptureFixture[str]) -> None:
    experiment: Any = run_cell()["line"]()
    for arguments in (experiment, ["train", experiment], "train --exp=fedavg_digits"):
        assert main(arguments) == 2
        assert "fedpax.train(experiment, " in capsys.readouterr().err
