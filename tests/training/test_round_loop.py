"""Runs that skip spikes, roll back, are killed between, and report the use of their time."""

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax
import pytest
from small_regression import ModelConfig, RandomRounds, Regression, shared_compilation

from fedpax.checkpoints import load_params
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.configuration import read_configuration
from fedpax.run_files.goodput import BUCKETS, read_goodput
from fedpax.run_files.metrics import TIMINGS, read_metrics, select
from fedpax.run_files.paths import latest_round
from fedpax.training import round_loop
from fedpax.training.diagnostics import Watchdog
from fedpax.training.experiment import Run
from fedpax.training.spikes import RepeatedSpikesError
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

BAD = 5
"""The cohort, from 0, whose targets are huge."""


class Killed(RuntimeError):
    """Raised while a cohort is drawn; the process saves nothing after it."""


class Spiky(RandomRounds):
    """A stream with bad cohorts, which leaves out some and can end the run at others."""

    bad: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    scale: float = 1.0
    settings: int = 0
    interrupt: ClassVar[dict[int, Any]] = {}

    def __next__(self) -> dict[str, np.ndarray]:
        while self.round in self.left_out:
            self.round += 1
        event = self.interrupt.pop(self.round, None)
        if event is Killed:
            raise Killed
        if callable(event):
            event()
        elif event is not None:
            os.kill(os.getpid(), event)
        is_bad = self.round in self.bad
        batch = super().__next__()
        return {**batch, "y": batch["y"] * np.float32(self.scale)} if is_bad else batch

    def get_state(self) -> dict[str, Any]:
        return {"position": self.round, "settings": self.settings}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["settings"] != self.settings:
            raise ValueError("The data have other settings.")
        self.round = state["position"]


@dataclasses.dataclass(frozen=True)
class SpikyRegression(Regression):
    """One client on one device.

    Attributes:
        bad: cohorts with huge targets.
        left_out: cohorts that the stream leaves out.
        scale: factor of the targets of bad cohorts.
        settings: of the data; no position of other settings fits.
    """

    bad: tuple[int, ...] = (BAD,)
    left_out: tuple[int, ...] = ()
    scale: float = 1e4
    settings: int = 0

    def build(self) -> Run:
        run = super().build()
        stream: Any = run.cohorts
        stream.__class__ = Spiky
        stream.bad, stream.left_out, stream.scale = self.bad, self.left_out, self.scale
        stream.settings = self.settings
        return run


BASE = TrainingConfig(
    rounds=10,
    evaluate_every=4,
    checkpoint_every=4,
    spike_window=2,
    spike_deviations=50.0,
    spike_limit=2,
)


@pytest.fixture(scope="module", autouse=True)
def compile_once() -> Iterator[None]:
    """Share compiled rounds among the runs, which differ in their data alone."""
    with shared_compilation():
        yield


def experiment(rounds: int = 10, **fields: Any) -> SpikyRegression:
    names = {field.name for field in dataclasses.fields(SpikyRegression)}
    training = {name: value for name, value in fields.items() if name not in names}
    own = {name: value for name, value in fields.items() if name in names}
    return SpikyRegression(
        training=dataclasses.replace(BASE, rounds=rounds, **training),
        model=ModelConfig(features=4, hidden=4),
        clients=1,
        mesh=MeshConfig(clients=1),
        **own,
    )


def params_of(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_params(folder).items()}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in read_metrics(folder)]


def test_skipping_equals_a_run_without_the_rounds_update(tmp_path: Path) -> None:
    assert train(experiment(on_spike="skip"), tmp_path / "skipped").finished
    assert train(experiment(9, on_spike="skip", left_out=(BAD,)), tmp_path / "without").finished
    assert params_of(tmp_path / "skipped") == params_of(tmp_path / "without")
    lines = select(read_metrics(tmp_path / "skipped"), "training")
    assert [line["skipped_rounds"] for line in lines] == [0] * 5 + [1] * 5
    assert lines[BAD]["loss"] > 1e3 * lines[BAD + 1]["loss"]

    # The choice is made in the program: the host gets the flag with the metrics of the round.
    Spiky.interrupt[BAD + 2] = Killed
    with pytest.raises(Killed):
        train(experiment(on_spike="skip"), tmp_path / "killed")
    assert train(experiment(on_spike="skip"), tmp_path / "killed").finished
    assert params_of(tmp_path / "killed") == params_of(tmp_path / "skipped")
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "skipped")


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rolled_back")
    assert train(experiment(on_spike="roll_back"), folder).finished
    return folder


def test_a_roll_back_goes_on_with_the_data_after_the_spike(
    rolled_back: Path, tmp_path: Path
) -> None:
    # Round 6 spikes: back to the checkpoint of round 4, without cohorts 4 and 5.
    train(experiment(on_spike="roll_back", left_out=(4, BAD)), tmp_path)
    assert params_of(rolled_back) == params_of(tmp_path)
    (spike,) = select(read_metrics(rolled_back), "spike")
    assert (spike["round"], spike["spike_round"], spike["cohorts_left_out"]) == (4, 6, 2)
    training = select(read_metrics(rolled_back), "training")
    assert [line["round"] for line in training] == list(range(1, 11))
    assert [line["spikes"] for line in training] == [0] * 4 + [1] * 6


@pytest.mark.parametrize(
    ("interrupt", "keep"),
    [
        ({BAD + 1: Killed}, 3),  # about when the spike is found
        pytest.param({BAD + 3: Killed}, 3, marks=pytest.mark.slow),  # after the roll back
        # A signal saves between the checkpoints that are due.
        pytest.param({BAD: signal.SIGTERM, 8: signal.SIGTERM}, 3, marks=pytest.mark.slow),
        ({BAD: signal.SIGTERM}, 1),
    ],
)
def test_a_run_that_rolls_back_resumes_identically(
    rolled_back: Path, tmp_path: Path, interrupt: dict[int, Any], keep: int
) -> None:
    Spiky.interrupt.update(interrupt)
    for _ in range(len(interrupt) + 1):
        try:
            result = train(experiment(on_spike="roll_back", keep_checkpoints=keep), tmp_path)
        except Killed:
            pass
    assert result.finished and not Spiky.interrupt
    assert params_of(tmp_path) == params_of(rolled_back)
    assert lines_of(tmp_path) == lines_of(rolled_back)


def test_a_roll_back_does_not_repeat_what_the_start_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_loop, "describe_end_of_schedule", lambda *_: "the schedule has ended")
    train(experiment(4, on_spike="roll_back"), tmp_path)
    assert "has ended" not in capsys.readouterr().err  # a new run has its whole schedule
    assert train(experiment(on_spike="roll_back"), tmp_path).finished
    messages = capsys.readouterr().err
    assert "rolled back to round 4" in messages
    assert messages.count("the schedule has ended") == 1


@pytest.mark.slow
def test_a_roll_back_to_data_of_other_settings_resumes_identically(tmp_path: Path) -> None:
    other = experiment(8, on_spike="roll_back", bad=(1,), settings=1)
    for name, interrupt in {
        "killed": {4: Killed},
        "signal": {1: signal.SIGTERM},
        "none": {},
    }.items():
        train(experiment(4, on_spike="roll_back", bad=()), tmp_path / name)
        Spiky.interrupt.update(interrupt)
        changed = ["training", "settings", "bad"]
        while True:
            try:
                if train(other, tmp_path / name, allow_config_change=changed).finished:
                    break
            except Killed:
                continue
            changed = []  # after a signal the run has a checkpoint with the new settings
        assert not Spiky.interrupt
        (spike,) = select(read_metrics(tmp_path / name), "spike")
        assert (spike["round"], spike["spike_round"], spike["cohorts_left_out"]) == (4, 6, 2)
        assert params_of(tmp_path / name) == params_of(tmp_path / "killed")


@pytest.mark.slow
def test_a_spike_before_the_first_checkpoint_returns_to_the_beginning(tmp_path: Path) -> None:
    train(experiment(5, on_spike="roll_back", bad=(), left_out=(0, 1, 2)), tmp_path / "without")
    folder = tmp_path / "rolled_back"
    # The square of such a target is infinite, which is a spike before the window is full.
    spiking = experiment(5, on_spike="roll_back", bad=(2,), scale=1e30)
    Spiky.interrupt[5] = Killed
    with pytest.raises(Killed):
        train(spiking, folder)
    train(spiking, folder)
    assert params_of(folder) == params_of(tmp_path / "without")
    (spike,) = select(read_metrics(folder), "spike")
    assert (spike["round"], spike["cohorts_left_out"], spike["loss"]) == (0, 3, None)
    assert (spike["spikes"], spike["non_finite_rounds"]) == (1, 1)


def test_spikes_that_recur_stop_the_run(tmp_path: Path) -> None:
    always = experiment(on_spike="roll_back", bad=tuple(range(BAD, 100)))
    with pytest.raises(RepeatedSpikesError, match="after 2 roll backs to round 4") as caught:
        train(always, tmp_path / "rolled_back")
    assert "The checkpoint of round 4 is kept in" in str(caught.value)
    assert "--training.spike_limit and --allow_config_change=training." in str(caught.value)
    skipping = experiment(on_spike="skip", bad=tuple(range(BAD, 100)))
    with pytest.raises(RepeatedSpikesError, match="the last 3 rounds were skipped"):
        train(skipping, tmp_path / "skipped")


def test_the_buckets_of_each_line_add_up_to_the_wall_time(rolled_back: Path) -> None:
    lines = [line for line in read_metrics(rolled_back) if line["kind"] != "run"]
    for before, line in itertools.pairwise(lines):
        parts = [line[f"{bucket}_seconds"] for bucket in BUCKETS]
        assert sum(parts) == pytest.approx(line["wall_seconds"], abs=1e-6)
        assert min(parts) > -1e-6
        assert line["wall_seconds"] >= before["wall_seconds"]
    assert lines[-1]["lost_seconds"] > 0
    seconds, _ = read_goodput(rolled_back)
    assert sum(seconds.values()) >= lines[-1]["wall_seconds"]


def test_update_norms_are_logged_on_request(tmp_path: Path) -> None:
    train(experiment(2, update_norm=True, checkpoint_every=1), tmp_path)
    before, after = load_params(tmp_path, 1), load_params(tmp_path, 2)
    squares = [np.sum((after[name] - before[name]) ** 2, dtype=np.float64) for name in after]
    line = select(read_metrics(tmp_path), "training")[1]
    assert line["update_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-5)
    assert not {"mfu"} & line.keys()  # a CPU has no known peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateEvaluated(SpikyRegression):
    """Training with an evaluation of the whole state."""

    def build(self) -> Run:
        def norm(state: Any) -> dict[str, float]:
            return {"norm": float(optax.tree.norm(state.params))}

        return super().build()._replace(evaluate_state=norm)


def test_evaluations_add_the_metrics_of_the_whole_state(tmp_path: Path) -> None:
    of_params = experiment(2, evaluate_every=1, checkpoint_every=1)
    fields = {field.name: getattr(of_params, field.name) for field in dataclasses.fields(of_params)}
    outcome = train(StateEvaluated(**fields), tmp_path)
    lines = select(read_metrics(tmp_path), "evaluation")
    assert [line["round"] for line in lines] == [1, 2]
    assert outcome.evaluation is not None and outcome.evaluation.keys() >= {"loss", "norm"}
    assert lines[1]["norm"] == outcome.evaluation["norm"] != lines[0]["norm"]
    for number, line in enumerate(lines, start=1):
        squares = [np.sum(np.float64(v) ** 2) for v in load_params(tmp_path, number).values()]
        assert line["norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-5)


@pytest.mark.slow
def test_rounds_are_profiled_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(experiment(4, profile_at="2:2"), tmp_path)
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
    errors = capsys.readouterr().err
    assert f"profile of rounds 2 to 3 in {tmp_path / 'profile'}; open it with: xprof" in errors
    assert "goodput " in errors.splitlines()[-1]
    # These settings have no effect on the training, so a run resumes with others.
    result = train(experiment(6, profile_at="6:9", hang_after=60.0, on_hang="exit"), tmp_path)
    assert result.finished and "profile of rounds 6 to 6 in" in capsys.readouterr().err
    assert read_configuration(tmp_path, experiment(6))[1].training.profile_at == "6:9"


def test_a_run_whose_data_stop_is_reported_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "hang_round_4.txt"

    def stop_until_reported() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists() and "stop_until_reported" in path.read_text():
                break  # the file has the stacks, too
            time.sleep(0.01)

    Spiky.interrupt[3] = stop_until_reported  # the cohort of round 4
    assert train(experiment(5, bad=(), hang_after=0.2), tmp_path).finished
    text = path.read_text()
    assert "in round 4 while waiting for its cohort" in text and "stop_until_reported" in text


def test_the_watchdog_hears_of_the_round_that_the_process_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    waited, device_get = [], jax.device_get

    def watch(clock: Any, folder: Path, round_number: Any, **settings: Any) -> Watchdog:
        asked.append(round_number)
        return Watchdog(clock, folder, round_number, **settings)

    def wait(values: Any) -> Any:
        if isinstance(values, dict) and "loss" in values:  # the devices are a round ahead by now
            waited.append(asked[0]())
        return device_get(values)

    monkeypatch.setattr("fedpax.training.trainer.Watchdog", watch)
    monkeypatch.setattr(jax, "device_get", wait)
    train(experiment(rounds=4), tmp_path)
    assert waited == [1, 2, 3, 4]


def test_data_that_cannot_be_read_save_the_completed_rounds(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("Example 7 of the corpus is no text.")

    Spiky.interrupt[6] = fail  # the cohort of round 7
    with pytest.raises(ValueError, match="Example 7"):
        train(experiment(bad=()), tmp_path / "failed")
    assert latest_round(tmp_path / "failed") == 6  # not 4, the last one that was due
    assert train(experiment(bad=()), tmp_path / "failed").finished
    assert train(experiment(bad=()), tmp_path / "whole").finished
    assert params_of(tmp_path / "failed") == params_of(tmp_path / "whole")
