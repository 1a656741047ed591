"""The best model on held-out data is kept, and a run that no longer improves stops."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.algorithm import FederatedAlgorithm
from fedpax.checkpoints.saved_state import load_params
from fedpax.commands.train import describe
from fedpax.data import FunctionRounds
from fedpax.errors import ConfigurationError
from fedpax.preemption import PreemptionGuard
from fedpax.run_files.metrics import read_metrics, select
from fedpax.run_files.paths import complete_rounds, latest_round
from fedpax.training import trainer
from fedpax.training.experiment import Experiment, Run
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

NAN = math.nan
#           round   1    2    3    4    5    6    7    8    9   10   11   12
LOSSES = (9.5, 9.0, 5.0, 6.0, 4.0, NAN, 4.5, 4.0, 4.2, 3.0, 3.5, 3.6, 3.7)


class Count(NamedTuple):
    params: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(Experiment):
    """The model counts the rounds, and the held-out loss is one of a list."""

    def build(self) -> Run:
        @jax.jit
        def advance(state: Count, cohort: Any) -> tuple[Count, dict[str, jax.Array]]:
            return Count({"count": state.params["count"] + jnp.mean(cohort.batches)}), {
                "loss": jnp.float32(1.0)
            }

        def evaluate(params: Any) -> dict[str, float]:
            loss = LOSSES[int(params["count"])]
            return {"loss": loss, "accuracy": 1 / loss, "perplexity": math.exp(loss)}

        return Run(
            algorithm=FederatedAlgorithm(lambda w: Count(jax.tree.map(jnp.copy, w)), advance),
            init=lambda key: {"count": jnp.float32(0)},
            cohorts=FunctionRounds(lambda number: fedpax.Cohort(np.ones((1, 1, 1), np.float32))),
            evaluate=evaluate,
            mesh=self.mesh.make(jax.devices()[:1]),
            items_per_round=1,
            placement="clients",
        )


def counted(rounds: int = 12, every: int = 1, saves: int = 5, **settings: Any) -> Counted:
    training = TrainingConfig(rounds, every, saves, keep_checkpoints=1, **settings)
    return Counted(training=training)


def saved_count(folder: Path, best: bool = False) -> int:
    return int(load_params(folder, best=best)["count"])


def counts(folder: Path) -> list[int]:
    return complete_rounds(folder / "checkpoints")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("metric", ["accuracy", "min:perplexity"])
def test_the_best_model_is_kept_beside_the_newest(folder: Path, metric: str) -> None:
    result = train(counted(keep_best=metric), folder)
    assert (result.rounds, result.finished, result.stopped_early) == (12, True, None)
    assert counts(folder) == [9, 12]
    assert saved_count(folder, best=True) == 9 and saved_count(folder) == 12


def test_a_run_stops_after_evaluations_without_improvement(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = counted(keep_best="loss", stop_after=3)
    result = train(experiment, folder)
    # Round 4 is the best; NaN, 4.5 and 4.0 are no improvement.
    assert (result.rounds, result.finished, result.signal) == (7, True, None)
    reason = "the held-out loss has not improved on 4.0000, of round 4, in 3 evaluations"
    assert result.stopped_early == reason
    assert f"stops after round 7: {reason}" in capsys.readouterr().err
    assert counts(folder) == [4, 7] and saved_count(folder, best=True) == 4
    (stop,) = select(read_metrics(folder), "stop")
    assert (stop["round"], stop["best_round"], stop["evaluations_since"]) == (7, 4, 3)
    assert describe(result, 12, "runs/x").startswith("Stopped early, after 7 of 12 rounds in runs")

    again = train(experiment, folder)
    assert (again.rounds_trained, again.finished, again.stopped_early) == (0, True, reason)
    assert "Nothing to do: stopped early" in describe(again, 12, "runs/x")
    # More rounds alone do not train on, and the remedy is told.
    more = train(counted(20, keep_best="loss", stop_after=3), folder)
    assert (more.rounds_trained, more.finished, more.stopped_early) == (0, True, reason)
    told = describe(more, 20, "runs/x")
    assert "after 7 of 20 rounds" in told and "To train on, raise --training.stop_after" in told
    # More patience trains on; the best model of before is still there.
    patient = counted(keep_best="loss", stop_after=4)
    with pytest.raises(ConfigurationError, match="stop_after: 3 -> 4"):
        train(patient, folder)
    later = train(patient, folder, allow_config_change=["training.stop_after"])
    assert (later.rounds, later.stopped_early and later.stopped_early[-13:]) == (8, "4 evaluations")
    assert counts(folder) == [4, 8]


def test_the_best_model_in_python(folder: Path) -> None:
    trained = fedpax.train(counted(keep_best="accuracy", stop_after=3), folder)
    assert trained.stopped_early and trained.stopped_early.startswith("the held-out accuracy")
    assert (trained.rounds, trained.params, trained.best_params) == (7, {"count": 7}, {"count": 4})


def test_without_keep_best_the_loss_decides_and_no_other_model_is_kept(folder: Path) -> None:
    assert train(counted(stop_after=3), folder).rounds == 7
    assert counts(folder) == [7]
    with pytest.raises(ValueError, match=r"keeps no best model .*--training.keep_best=loss"):
        load_params(folder, best=True)


class Interrupted(Exception):
    """A kill."""


@pytest.mark.parametrize(
    ("by", "after"), [("signal", 4), ("signal", 7), ("kill", 3), ("kill", 5), ("kill", 7)]
)
def test_a_run_that_resumes_stops_and_keeps_as_an_unbroken_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, after: int, by: str
) -> None:
    experiment = counted(keep_best="loss", stop_after=3, saves=2)

    class Stopped(PreemptionGuard):
        def should_stop(self, round_number: int) -> bool:
            if round_number >= after and by == "kill":
                raise Interrupted
            return round_number >= after

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "PreemptionGuard", Stopped)
        try:
            train(experiment, folder)
        except Interrupted:
            assert by == "kill"
    result = train(experiment, folder)
    assert result.rounds == latest_round(folder) == 7 and result.stopped_early is not None
    assert counts(folder) == [4, 7]
    assert [line["round"] for line in select(read_metrics(folder), "evaluation")] == [*range(1, 8)]
    assert len(select(read_metrics(folder), "stop")) == 1


def test_keep_best_can_begin_in_a_finished_run(folder: Path) -> None:
    train(counted(rounds=6), folder)  # the model of round 4, the best one, is lost
    train(counted(rounds=8, keep_best="loss"), folder)
    assert counts(folder) == [7, 8] and saved_count(folder, best=True) == 7


def test_the_commands_name_the_best_model(
    folder: Path, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    train(counted(keep_best="loss", stop_after=3, export_every=12), folder)
    assert [path.name for path in (folder / "exports").iterdir()] == ["7"]
    chosen = [f"--job_log_dir={folder}", "--exp=test_early_stop:counted"]
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"exp": chosen[1][6:]})
    )
    status, output, errors = run("evaluate", *chosen, "--round=best")
    assert status == 0 and "round 4: held-out loss 4.0000" in output, errors
    out = tmp_path / "exported"
    exports = ["export", *chosen, "--format=orbax", f"--out={out}"]
    assert run(*exports, "--round=best")[0] == 0 and out.is_dir()
    status, _, errors = run("evaluate", *chosen, "--round=bests")
    assert status == 2 and "expected a round or `best`" in errors
    status, output, _ = run("show", f"--job_log_dir={folder}")
    assert "| 7/12 " in " ".join(output.split()) and "| finished |" in output


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_best": "best:loss"}, "is not a metric"),
        ({"keep_best": "min:"}, "is not a metric"),
        ({"keep_best": ""}, "is not a metric"),
        ({"stop_after": -1}, "stop_after=-1: expected an int of at least 0"),
        ({"stop_after": 2, "every": 0}, "--training.evaluate_every"),
    ],
)
def test_wrong_settings_raise(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        counted(**settings)


def test_an_unknown_metric_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no metric 'acc', expected one of loss, accuracy"):
        train(counted(keep_best="acc"), folder)
    assert not folder.exists()  # before the first round
    with pytest.raises(ValueError, match=r"round_number=3 and best=True"):
        load_params(folder, 3, best=True)
