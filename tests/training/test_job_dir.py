"""A run's folder is used by one process at a time and is bound to one experiment."""

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from optax import ScaleByScheduleState as Counter
from small_regression import ModelConfig, Regression, regression, single_client

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.errors import ConfigurationError
from fedpax.experiments.pretrain import pretrain_text
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.configuration import read_configuration, write_configuration
from fedpax.run_files.paths import CONFIGURATION
from fedpax.training import folder_owners, resume_checks, round_loop
from fedpax.training.folder_owners import JobDirLock
from fedpax.training.resume_checks import check_configuration, describe_end_of_schedule
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

HOLDER = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, f"process {os.getpid()} on somehost".encode())
print("locked", flush=True)
time.sleep(60)
"""


@dataclasses.dataclass(frozen=True)
class OtherExperiment(Regression):
    """Another class with the same fields."""


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / folder_owners.LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        words = rf"in use by another process \(process {holder.pid} on somehost\).*another --job_lo"
        with pytest.raises(ConfigurationError, match=words):
            JobDirLock(tmp_path)
        holder.send_signal(signal.SIGKILL)
    with JobDirLock(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / folder_owners.LOCK).read_text()


def test_the_lock_is_released_at_the_end(tmp_path: Path) -> None:
    with JobDirLock(tmp_path), pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
        JobDirLock(tmp_path)
    with JobDirLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            ConfigurationError, match=r"cannot hold a run.*Set another --job_log_di"
        ):
            JobDirLock(folder)


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with JobDirLock(folder):
        assert (folder / folder_owners.LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with JobDirLock(folder):
        (folder / "metrics.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_lock_whose_file_was_deleted_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former holder deletes the file after this process opened it."""
    former = JobDirLock(tmp_path)
    flock, calls = fcntl.flock, []

    def late(file: int, operation: int) -> None:
        if not calls:
            former.__exit__()
        calls.append(file)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with JobDirLock(tmp_path):
        monkeypatch.undo()
        assert len(calls) == 2 and (tmp_path / folder_owners.LOCK).exists()
        with pytest.raises(ConfigurationError, match="in use"):
            JobDirLock(tmp_path)


def test_changes_of_the_state_are_not_offered(tmp_path: Path) -> None:
    experiment = dataclasses.replace(regression(), mesh=MeshConfig(), clients=2)
    write_configuration(tmp_path, experiment, exp="x")
    state = experiment.build().algorithm.init({"hidden": jnp.zeros((16, 32)), "out": jnp.ones(32)})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state, {}, {})

    def refusal(**fields: object) -> str:
        with pytest.raises(ConfigurationError) as caught:
            check_configuration(tmp_path, dataclasses.replace(experiment, **fields), "x")
        return str(caught.value)

    for change in ({"learning_rate": 0.5}, {"clients": 4}):  # more clients get the states of two
        assert f"--allow_config_change={next(iter(change))} to resume it" in refusal(**change)
    wider = refusal(model=ModelConfig(hidden=64))
    assert "  model.hidden: 32 -> 64\n" in wider and "--allow_config_change" not in wider
    assert "its state would have another structure" in wider
    assert "params.hidden has shape [16, 32], expected [16, 64] as in the experiment" in wider


def changed(**fields: object) -> Regression:
    return dataclasses.replace(regression(), **fields)


def test_an_empty_folder_and_the_same_configuration_are_accepted(tmp_path: Path) -> None:
    check_configuration(tmp_path, regression(), "a")
    assert list(tmp_path.iterdir()) == []  # a check writes nothing
    write_configuration(tmp_path, regression(), "a")
    check_configuration(tmp_path, regression(), "a")
    check_configuration(tmp_path, regression(), "b")  # another name for the same configuration


def test_changed_fields_are_listed_and_refused(tmp_path: Path) -> None:
    write_configuration(tmp_path, regression(), "a")
    other = changed(learning_rate=0.5, mesh=MeshConfig(clients=2))
    with pytest.raises(ConfigurationError) as caught:
        check_configuration(tmp_path, other, "a")
    message = str(caught.value)
    assert "  learning_rate: 0.01 -> 0.5\n" in message and "  mesh.clients: 4 -> 2\n" in message
    assert "another --job_log_dir" in message
    assert "--allow_config_change=mesh.clients,mesh.fsdp,learning_rate" in message
    assert read_configuration(tmp_path, regression()) == ("a", regression())


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        (["learning_rate"], "mesh.clients"),
        (["mesh"], "learning_rate"),
        (["mesh.clients", "learning_rate"], "mesh.fsdp"),
        (["learning_rate", "training", "mesh"], None),
        (["learning_rate", "mesh.fsdp", "mesh.clients"], None),
    ],
)
def test_only_the_named_fields_may_change(
    tmp_path: Path, allowed: list[str], refused: str | None
) -> None:
    write_configuration(tmp_path, regression(), "a")
    other = changed(learning_rate=0.5, mesh=MeshConfig(clients=2))
    if refused is None:
        check_configuration(tmp_path, other, "a", allow_config_change=allowed)
        return
    with pytest.raises(ConfigurationError, match=f"  {refused}: ") as caught:
        check_configuration(tmp_path, other, "a", allow_config_change=allowed)
    assert not any(f"  {name}: " in str(caught.value) for name in allowed)


@pytest.mark.parametrize("name", ["learning_rat", "mesh.", "mes", "model.hidden.x"])
def test_a_misspelled_field_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="names no field of the experiment"):
        check_configuration(tmp_path, regression(), allow_config_change=[name])


@pytest.mark.parametrize(
    ("done", "rounds", "accepted"), [(12, 20, True), (12, 5, False), (9, 20, False)]
)
def test_only_a_finished_run_takes_more_rounds_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int, rounds: int, accepted: bool
) -> None:
    write_configuration(tmp_path, regression(), "a")
    monkeypatch.setattr(resume_checks, "latest_round", lambda folder: done)
    other = changed(training=dataclasses.replace(regression().training, rounds=rounds))
    if accepted:
        check_configuration(tmp_path, other, "a")
    else:
        with pytest.raises(ConfigurationError, match=f"training.rounds: 12 -> {rounds}"):
            check_configuration(tmp_path, other, "a")
    check_configuration(tmp_path, other, "a", allow_config_change=["training.rounds"])


def test_another_experiment_is_refused_before_its_fields_are_shown(tmp_path: Path) -> None:
    secret = changed(model=ModelConfig(hidden=12345))
    other = OtherExperiment(training=secret.training, mesh=secret.mesh)
    write_configuration(tmp_path, secret, "theirs")
    for experiment, exp in ((other, "mine"), (other, ""), (regression(), "mine")):
        with pytest.raises(ConfigurationError, match="another experiment, --exp=theirs") as caught:
            check_configuration(tmp_path, experiment, exp, allow_config_change=["model", "mesh"])
        message = str(caught.value)
        assert "12345" not in message and "hidden" not in message and "--allow" not in message
        assert "Set another --job_log_dir" in message


@pytest.mark.parametrize("exp", ["mine:linear", "./mine.py:linear", "../x/mine.py:linear"])
def test_one_function_has_several_names(tmp_path: Path, exp: str) -> None:
    write_configuration(tmp_path, regression(), "./x/mine.py:linear")
    with pytest.raises(ConfigurationError, match="this experiment with another configuration"):
        check_configuration(tmp_path, changed(learning_rate=0.5), exp)


def test_code_of_another_experiment_is_not_imported(tmp_path: Path) -> None:
    write_configuration(tmp_path, regression(), "a")
    path = tmp_path / CONFIGURATION
    path.write_text(path.read_text().replace("small_regression:Regression", "not_there:Gone"))
    expected = (
        "holds a not_there:Gone, expected a small_regression:Regression, as --exp=a makes now"
    )
    with pytest.raises(
        ConfigurationError, match=f"{expected}.*write its new name into config.json"
    ):
        check_configuration(tmp_path, regression(), "a")


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigurationError, match=f"{name} is a file, expected a folder.*Move the"):
        check_configuration(tmp_path, regression())


def test_another_span_of_the_schedule_in_steps_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = pretrain_text()
    former_span = "now, and spanned 40 steps (10 rounds of 4): the learning rate continues on the"
    cases: list[tuple[Literal["cosine", "constant", "linear"], int, int, str]] = [
        ("linear", 10, 4, ""),  # another schedule of as many steps
        ("cosine", 20, 4, f"80 steps (20 rounds of 4) {former_span} longer schedule, and can rise"),
        ("cosine", 20, 1, f"20 steps (20 rounds of 1) {former_span} shorter schedule."),
        ("cosine", 10, 2, f"20 steps (10 rounds of 2) {former_span} shorter schedule."),
        ("cosine", 20, 2, ""),
        ("constant", 30, 4, ""),
    ]
    for schedule, rounds, local_steps, told in cases:
        optimizer = dataclasses.replace(base.optimizer, schedule=schedule)
        training = dataclasses.replace(base.training, rounds=10)
        data = dataclasses.replace(base.data, local_steps=4)
        former = dataclasses.replace(base, optimizer=optimizer, training=training, data=data)
        now = dataclasses.replace(
            former,
            training=dataclasses.replace(training, rounds=rounds),
            data=dataclasses.replace(data, local_steps=local_steps),
        )
        if schedule == "linear":
            former = dataclasses.replace(former, optimizer=base.optimizer)
        folder = tmp_path / f"{schedule}{rounds}{local_steps}"
        folder.mkdir()
        write_configuration(folder, former, "pretrain_text")
        check_configuration(folder, former, "pretrain_text")
        assert not capsys.readouterr().err
        allowed = ["training.rounds", "data.local_steps", "optimizer.schedule"]
        check_configuration(folder, now, "pretrain_text", allow_config_change=allowed)
        line = capsys.readouterr().err
        assert bool(line) == bool(told)
        assert line.startswith(told and f"--optimizer.schedule=cosine spans {told}")


@pytest.mark.parametrize(
    ("steps", "done", "told"),
    [
        # 4 rounds of 8 steps, then 4 of 2: the schedule of 16 steps has ended
        ([32, 32], 4, "has done 32 steps, and has 8 left: all of them take the schedule's final"),
        ([14, 14], 3, "has done 14 steps, and has 10 left: the last 8 of them take the schedule's"),
        ([8, 8], 4, None),  # 4 rounds of 2
        ([3, 4], 4, None),  # islands that have left steps out
    ],
)
def test_steps_after_the_end_of_the_schedule_are_told(
    steps: list[int], done: int, told: str | None
) -> None:
    base = pretrain_text()
    now = dataclasses.replace(
        base,
        training=dataclasses.replace(base.training, rounds=8),
        data=dataclasses.replace(base.data, local_steps=2),
    )
    # Adam counts too, and an outer optimizer could have other steps.
    optimizer = now.optimizer.make(16)
    state = optimizer.init({"w": jnp.zeros(3)})
    state = jax.tree.map(
        lambda x: x._replace(count=jnp.array(steps)) if isinstance(x, Counter) else x,
        {"inner_optimizer_state": state},
        is_leaf=lambda x: isinstance(x, Counter),
    )
    line = describe_end_of_schedule(now, done, state)
    assert (line is None) == (told is None)
    words = "--optimizer.schedule=cosine spans 16 steps (8 rounds of 2). The run "
    assert line is None or line.startswith(f"{words}{told}")
    constant = dataclasses.replace(now.optimizer, schedule="constant")
    assert describe_end_of_schedule(dataclasses.replace(now, optimizer=constant), 4, state) is None


def test_a_run_that_resumes_tells_the_end_of_its_schedule_from_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(experiment: Regression, done: int, state: Any) -> str:
        return f"the state of round {done} of {experiment.training.rounds} has {int(state.steps)}"

    monkeypatch.setattr(round_loop, "describe_end_of_schedule", describe)
    for rounds, told in ((1, False), (2, True)):
        training = TrainingConfig(rounds=rounds, evaluate_every=0, checkpoint_every=0)
        train(dataclasses.replace(single_client(), training=training), tmp_path)
        assert ("the state of round 1 of 2 has 2" in capsys.readouterr().err) == told
