import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import chex
import jax
import numpy as np
import pytest
from small_regression import RandomRounds, Regression, regression, shared_compilation

from fedpax.algorithm import FederatedAlgorithm
from fedpax.checkpoints import load_params
from fedpax.checkpoints.run_position import restore_stream
from fedpax.errors import ConfigurationError
from fedpax.experiments.fedavg_images import fedavg_digits
from fedpax.parallel.mesh import MeshConfig, default_devices
from fedpax.run_files.configuration import read_configuration
from fedpax.run_files.goodput import GoodputClock
from fedpax.run_files.metrics import RESERVED_METRICS, TIMINGS, MetricsWriter, read_metrics, select
from fedpax.training.experiment import Experiment, Run
from fedpax.training.flops_utilization import Utilization
from fedpax.training.progress import Progress
from fedpax.training.round_logger import NonFiniteError, RoundLogger
from fedpax.training.spikes import FiniteCheck, SpikeHistory
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig


def settings(experiment: Regression, **changes: Any) -> Regression:
    training = dataclasses.replace(experiment.training, **changes)
    return dataclasses.replace(experiment, training=training)


def assert_same_run(one: Path, other: Path) -> None:
    """Compare the parameters bit by bit, and the lines apart from timings."""
    for a, b in zip(
        jax.tree.leaves(load_params(one)), jax.tree.leaves(load_params(other)), strict=True
    ):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
    without_timings = [
        [{k: v for k, v in line.items() if k not in TIMINGS} for line in read_metrics(folder)]
        for folder in (one, other)
    ]
    assert without_timings[0] == without_timings[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = train(regression(), folder, exp="regression")
    assert (result.rounds, result.finished, result.rounds_trained, result.signal) == (
        12, True, 12, None,
    )  # fmt: skip
    assert result.evaluation == {"loss": select(read_metrics(folder), "evaluation")[-1]["loss"]}
    return folder


def test_the_folder_holds_the_checkpoints_and_metrics_of_the_settings(uninterrupted: Path) -> None:
    assert read_configuration(uninterrupted, regression()) == ("regression", regression())
    assert {p.name for p in (uninterrupted / "checkpoints").iterdir()} == {"6", "9", "12"}
    assert len(list((uninterrupted / "tensorboard").iterdir())) == 1
    lines = read_metrics(uninterrupted)
    assert (lines[0]["kind"], lines[0]["num_parameters"]) == ("run", 16 * 32 + 32)
    training, evaluation = select(lines, "training"), select(lines, "evaluation")
    assert [line["round"] for line in training] == list(range(1, 13))
    assert [line["round"] for line in evaluation] == [4, 8, 12]
    assert [line["items"] for line in training] == [128 * n for n in range(1, 13)]
    per_round = lines[0]["bytes_across_placement_per_round"]
    assert per_round >= 4 * lines[0]["num_parameters"]
    assert (
        training[-1]["bytes_across_placement"]
        == 12 * per_round
        == evaluation[-1]["bytes_across_placement"]
    )
    assert all(line["items_per_second"] == 128 / line["seconds"] for line in training)


def test_the_losses_fall(uninterrupted: Path) -> None:
    lines = read_metrics(uninterrupted)
    training, evaluation = select(lines, "training"), select(lines, "evaluation")
    assert training[-1]["loss"] < 0.5 * training[0]["loss"]
    assert evaluation[-1]["loss"] < 0.5 * evaluation[0]["loss"]


def test_a_plain_loop_gives_the_same_losses_and_parameters(uninterrupted: Path) -> None:
    run = regression().build()
    state = run.algorithm.init(run.init(jax.random.key(0)))
    step = jax.jit(run.algorithm.round)
    losses = []
    for _ in range(12):
        state, metrics = step(state, next(run.cohorts))
        losses.append(float(metrics["loss"]))
    chex.assert_trees_all_close(
        load_params(uninterrupted), jax.device_get(state.params), rtol=1e-4, atol=1e-6
    )
    recorded = [line["loss"] for line in select(read_metrics(uninterrupted), "training")]
    np.testing.assert_allclose(recorded, losses, rtol=1e-4)


def test_a_finished_run_is_left_unchanged(uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    assert train(regression(), uninterrupted) == (12, True, 0, None, None, None)
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_rounds_that_are_kept_forever_are_saved_too(tmp_path: Path) -> None:
    train(
        settings(regression(), rounds=8, checkpoint_every=3, keep_checkpoints=1, keep_every=2),
        tmp_path,
    )
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"2", "4", "6", "8"}


@dataclasses.dataclass(frozen=True)
class Interrupted(Regression):
    """Receives a signal while the cohort of some round is drawn."""

    signals: ClassVar[dict[int, signal.Signals]] = {}

    def build(self) -> Run:
        class Stream(RandomRounds):
            def __next__(stream) -> dict[str, np.ndarray]:
                if number := self.signals.pop(stream.round, None):
                    os.kill(os.getpid(), number)
                return super().__next__()

        run = super().build()
        stream: Any = run.cohorts
        return run._replace(cohorts=Stream(stream.shape, stream.features, stream.seed))


@pytest.fixture
def compile_once() -> Iterator[None]:
    """Share the compiled round among the runs of a test."""
    with shared_compilation():
        yield


def test_a_signal_saves_after_the_round_and_the_run_resumes(
    uninterrupted: Path, tmp_path: Path, compile_once: None
) -> None:
    base = regression()
    experiment = Interrupted(training=base.training, mesh=base.mesh)
    done = 0
    for at, number in ((5, signal.SIGTERM), (7, signal.SIGINT)):
        handler = signal.getsignal(number)
        Interrupted.signals[at] = number
        result = train(experiment, tmp_path)
        assert result.signal == number and not result.finished
        # A later round was prefetched when the signal arrived, or the loop waited for it.
        assert (
            result.rounds in (at - 1, at, at + 1) and result.rounds_trained == result.rounds - done
        )
        done = result.rounds
        assert signal.getsignal(number) == handler
        assert f"{done}" in {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert train(experiment, tmp_path).finished
    assert_same_run(uninterrupted, tmp_path)


@pytest.mark.slow
def test_a_finished_run_takes_more_rounds(uninterrupted: Path, tmp_path: Path) -> None:
    train(settings(regression(), rounds=7), tmp_path)
    with pytest.raises(ConfigurationError, match=r"training\.rounds: 7 -> 6"):
        train(settings(regression(), rounds=6), tmp_path)
    result = train(regression(), tmp_path)
    assert (result.rounds, result.rounds_trained) == (12, 5)
    params, expected = load_params(tmp_path), load_params(uninterrupted)
    assert all(params[k].tobytes() == expected[k].tobytes() for k in expected)


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh_from_the_same_state(
    uninterrupted: Path, tmp_path: Path
) -> None:
    train(settings(regression(), rounds=6), tmp_path)
    other = dataclasses.replace(regression(), mesh=MeshConfig(clients=2, fsdp=4))
    result = train(other, tmp_path, allow_config_change="mesh")
    assert (result.rounds, result.rounds_trained) == (12, 6)
    # Another mesh adds in another order.
    chex.assert_trees_all_close(
        load_params(tmp_path), load_params(uninterrupted), rtol=1e-4, atol=1e-6
    )


def train_on(num_devices: int, experiment: Experiment, rounds: int, folder: Path) -> Any:
    training = TrainingConfig(rounds=rounds, evaluate_every=0, checkpoint_every=0)
    with default_devices(jax.devices()[:num_devices]):
        result = train(dataclasses.replace(experiment, training=training), folder)
    assert result.rounds == rounds
    return load_params(folder)


@pytest.mark.slow
def test_a_run_on_all_devices_resumes_on_any_number_of_them(
    uninterrupted: Path, tmp_path: Path
) -> None:
    """With mesh.clients=-1 the number of devices that are found is no change of configuration."""
    experiment = dataclasses.replace(regression(), mesh=MeshConfig(clients=-1))
    train_on(1, experiment, 2, tmp_path)
    result = train_on(8, experiment, 6, tmp_path)
    # Another mesh adds in another order.
    chex.assert_trees_all_close(result, load_params(uninterrupted, 6), rtol=1e-4, atol=1e-6)
    lines = select(read_metrics(tmp_path), "training")
    sent = [line["bytes_across_placement"] for line in lines]
    assert sent[:2] == [0, 0]  # one device sends nothing
    assert sent[5] == 4 * sent[2] and sent[2] >= 4 * 544


class Checked(RandomRounds):
    """A stream whose state is a round and the settings that must be the same."""

    keeps_round = True

    @property
    def name(self) -> str:
        return "round" if self.keeps_round else "position"

    def get_state(self) -> dict[str, Any]:
        return {"settings": list(self.shape), self.name: self.round}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["settings"] != list(self.shape):
            raise ValueError(f"shape is {self.shape} and was {state['settings']}")
        self.round = state[self.name]


@pytest.mark.parametrize(("keeps_round", "after"), [(True, 7), (False, 0)])
def test_changed_data_keep_the_round_where_they_can(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, keeps_round: bool, after: int
) -> None:
    monkeypatch.setattr(Checked, "keeps_round", keeps_round)
    old, new = Checked((8, 2, 8), 3, seed=0), Checked((4, 2, 8), 3, seed=0)
    old.round = 7
    with pytest.raises(ValueError, match="shape is"):
        restore_stream(new, old.get_state(), must_fit=True)
    restore_stream(new, old.get_state(), must_fit=False)
    assert new.round == after
    beginning, new.round = {**new.get_state(), new.name: 0}, 9  # a run that rolls back
    restore_stream(new, old.get_state(), must_fit=False, beginning=beginning)
    assert new.round == after
    assert "shape is (4, 2, 8) and was [8, 2, 8]" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_cohorts_train_on_any_number_of_devices(tmp_path: Path) -> None:
    experiment = fedavg_digits()
    assert experiment.mesh.clients == -1
    expected = train_on(1, experiment, 6, tmp_path / "one")
    train_on(1, experiment, 2, tmp_path / "moved")
    train_on(8, experiment, 4, tmp_path / "moved")
    result = train_on(2, experiment, 6, tmp_path / "moved")
    chex.assert_trees_all_close(result, expected, rtol=1e-3, atol=1e-5)


def test_zero_saves_and_evaluates_only_after_the_last_round(tmp_path: Path) -> None:
    train(settings(regression(), rounds=3, evaluate_every=0, checkpoint_every=0), tmp_path)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"3"}
    assert [x["round"] for x in select(read_metrics(tmp_path), "evaluation")] == [3]


@pytest.mark.parametrize("stop", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_stops_the_run_or_is_recorded(tmp_path: Path, stop: bool) -> None:
    experiment = dataclasses.replace(
        settings(regression(), checkpoint_every=1, stop_on_non_finite=stop), learning_rate=5.0
    )
    if not stop:
        assert train(experiment, tmp_path).finished
        assert select(read_metrics(tmp_path), "training")[-1]["loss"] is None
        return
    with pytest.raises(NonFiniteError, match="smaller learning rate") as caught:
        train(experiment, tmp_path)
    lines = select(read_metrics(tmp_path), "training")
    assert len(lines) < 12
    kept = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert f"The checkpoint of round {kept} is kept" in str(caught.value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(load_params(tmp_path)))


@contextmanager
def round_logger(folder: Path, stop_on_non_finite: bool = True) -> Iterator[RoundLogger]:
    with MetricsWriter(folder) as metrics, Progress("x", rounds_done=0, rounds=1) as progress:
        yield RoundLogger(
            metrics,
            progress,
            clock=GoodputClock(folder, enabled=False),
            history=SpikeHistory([], regression().training),
            items_per_round=1,
            bytes_across_placement=0.0,
            stop_on_non_finite=stop_on_non_finite,
            utilization=Utilization(6.0, "6 N", num_chips=1, chip="v5e", peak_flops=1e12),
        )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"accuracy": 0.5}, r"the metrics \['accuracy'\], expected the key \"loss\""),
        ({"loss": np.zeros(3)}, r"metrics\['loss'\] as an array \[3\], expected a number"),
        ({"loss": 0.5, "name": "x"}, r"metrics\['name'\] as a str, expected a number"),
        ({"loss": 0.5, "items": 3.0}, r"the metrics \['items'\], expected names.*Rename them"),
    ],
)
def test_held_out_metrics_that_cannot_be_logged_raise(
    tmp_path: Path, values: dict, words: str
) -> None:
    with round_logger(tmp_path) as logger:
        logger.log_evaluation(1, {"loss": jax.numpy.float32(0.5)})  # scalars of JAX are numbers
        with pytest.raises(ValueError, match=words):
            logger.log_evaluation(2, values)
    assert [line["loss"] for line in read_metrics(tmp_path)] == [0.5]


def test_reserved_metrics_are_the_keys_that_the_training_loop_adds(tmp_path: Path) -> None:
    with round_logger(tmp_path) as logger:
        values = {"loss": jax.numpy.float32(0.5), "update_norm": jax.numpy.float32(2.0)}
        logger.log_round(1, values, idle_seconds=0.0)
        logger.flush()
        logger.log_evaluation(1, {"loss": 0.5})
    assert set().union(*read_metrics(tmp_path)) == RESERVED_METRICS | {"loss"}
    assert all(f"`{name}`" in FederatedAlgorithm.__doc__ for name in RESERVED_METRICS)


def test_a_model_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    class State(NamedTuple):
        params: Any
        least: Any

    def check(stop: bool, bad: float, least: float = 1.0) -> None:
        with round_logger(tmp_path, stop) as logger:
            start = State({"w": np.array([1.0, bad], np.float32), "count": np.int32(3)}, np.inf)
            logger.check_state(4, start._replace(least=least), FiniteCheck(start))

    check(True, 2.0)
    check(True, 2.0, least=np.inf)  # as at the start
    check(False, np.nan)
    for bad in (np.nan, np.inf):
        with pytest.raises(
            NonFiniteError, match=r"state.params\['w'\] is not finite after round 4"
        ):
            check(True, bad)


@dataclasses.dataclass(frozen=True)
class Broken(Regression):
    """A run whose round cannot be traced."""

    def build(self) -> Run:
        def round(*_: Any) -> Any:
            raise ValueError("the round is broken")

        run = super().build()
        return run._replace(algorithm=run.algorithm._replace(round=round))


def test_a_run_that_is_refused_leaves_no_file(tmp_path: Path) -> None:
    broken = Broken(training=regression().training, mesh=regression().mesh)
    with pytest.raises(ValueError, match="the round is broken"):
        train(broken, tmp_path)
    with pytest.raises(ValueError, match=r"begins at round 13.*=12: expected a round from 1 to 12"):
        train(settings(regression(), profile_at="13:2"), tmp_path)
    assert list(tmp_path.iterdir()) == []
