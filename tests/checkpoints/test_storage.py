"""Runs on a full disk and with damaged files: one sentence, and the last checkpoint stays whole."""

import dataclasses
import gc
import os
import resource
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from small_regression import ModelConfig, Regression, regression

from fedpax.checkpoints import checkpoint
from fedpax.checkpoints.checkpoint_files import DamagedCheckpointError, set_aside_after
from fedpax.checkpoints.saved_state import load_params
from fedpax.console import hide_late_writes
from fedpax.errors import ConfigurationError
from fedpax.main import main
from fedpax.run_files.metrics import MetricsWriter, read_metrics
from fedpax.run_files.paths import latest_round
from fedpax.training.trainer import StorageError, train

HERE = Path(__file__).parent.parent


def short(rounds: int) -> Regression:
    training = dataclasses.replace(regression().training, rounds=rounds, checkpoint_every=2)
    # Several arrays do not fit a small disk, so several writes of a checkpoint fail.
    return dataclasses.replace(regression(), training=training, model=ModelConfig(hidden=256))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writes beyond a file size fail, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    # Python would keep the written part of a module's bytecode, and fail at its next import.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def four_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    train(short(4), folder, exp="small_regression:regression")
    return folder


@pytest.fixture
def folder(four_rounds: Path, tmp_path: Path) -> Path:
    """A copy of a run with checkpoints of the rounds 2 and 4."""
    subprocess.run(["cp", "-r", four_rounds, tmp_path / "run"], check=True)
    return tmp_path / "run"


@pytest.mark.slow
def test_a_disk_that_is_full_for_checkpoints_keeps_the_last_one(
    folder: Path,
    capfd: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = load_params(folder)
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    hide_late_writes()  # as the program does
    with largest_file(8000), pytest.raises(StorageError) as caught:  # too small for the state
        train(short(8), folder, exp="small_regression:regression")
    assert str(caught.value) == (
        "small_regression:regression stopped: File too large. The checkpoint of round 4 is kept in "
        f"{folder}. Raise the limit on the size of files (`ulimit -f`), then run the same command "
        "again to resume."
    )
    assert "Traceback" not in capfd.readouterr().err
    del caught
    gc.collect()  # asyncio logs the errors of the other writes when their futures are collected
    assert [record for record in caplog.records if record.exc_info] == unraisable == []
    chex.assert_trees_all_equal(load_params(folder), before)
    assert train(short(8), folder, exp="small_regression:regression").rounds_trained == 4
    assert latest_round(folder) == 8


def test_only_late_writes_to_a_closed_event_loop_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    hide_late_writes()
    errors = [RuntimeError("Event loop is closed"), RuntimeError("closed"), ValueError("x"), None]
    for error in errors:
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))
    assert [unraisable.exc_value for unraisable in shown] == errors[1:]


def test_a_disk_that_is_full_for_metrics_keeps_the_last_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MetricsWriter, *line: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsWriter, "write", full)
    with pytest.raises(StorageError, match=r"No space left on device\. The checkpoint of round 4"):
        train(short(8), folder)
    monkeypatch.undo()
    assert train(short(8), folder).rounds_trained == 4


def test_a_folder_that_is_removed_while_the_run_trains_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: MetricsWriter, *line: Any) -> None:
        subprocess.run(["rm", "-r", folder], check=True)
        (folder / "metrics.jsonl").read_text()

    monkeypatch.setattr(MetricsWriter, "write", write)
    with pytest.raises(StorageError, match=r"run/metrics\.jsonl was removed while the run trained"):
        train(short(8), folder)


def test_the_command_line_says_it_in_one_line(
    folder: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    hide_late_writes()  # as the program does
    fields = ["--training.rounds=6", "--training.checkpoint_every=2", "--model.hidden=256"]
    command = ["train", "--exp=small_regression:regression", f"--job_log_dir={folder}", *fields]
    with largest_file(8000):
        assert main(command) == 1
    gc.collect()  # late writes would be told here
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].startswith("fedpax: small_regression:regression stopped: ")
    assert "Traceback" not in output.err


def files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found(folder: Path) -> None:
    random = np.random.default_rng(0)
    newest = folder / "checkpoints" / "4"
    expected = load_params(folder)
    result = 0
    for path in files(newest):
        if path.stat().st_size == 0:
            continue
        content = bytearray(path.read_bytes())
        place = int(random.integers(len(content)))
        content[place] ^= 1 << int(random.integers(8))
        original = path.read_bytes()
        path.write_bytes(content)
        if path.name in ("_CHECKPOINT_METADATA", "commit_success.txt"):  # times, and no data
            chex.assert_trees_all_equal(load_params(folder), expected)
        else:
            with pytest.raises(DamagedCheckpointError, match="round 4 is damaged"):
                load_params(folder)
            result += 1
        path.write_bytes(original)
    assert result > 5
    chex.assert_trees_all_equal(load_params(folder), expected)


def test_later_checkpoints_are_set_aside(folder: Path, capfd: pytest.CaptureFixture) -> None:
    checkpoints = folder / "checkpoints"
    set_aside_after(checkpoints, 4)
    assert capfd.readouterr().err == "" and latest_round(folder) == 4
    for aside in ("checkpoint_4_before_round_2_resumed", "checkpoint_4_before_round_2_resumed_"):
        subprocess.run(["cp", "-r", checkpoints / "4", folder / "copy"], check=True)
        set_aside_after(checkpoints, 2)
        assert f"Moved {checkpoints / '4'} to {folder / aside}: " in capfd.readouterr().err
        assert latest_round(folder) == 2 and files(folder / aside)
        (folder / "copy").rename(checkpoints / "4")
    assert load_params(folder, 4)


def test_a_folder_that_orbax_cannot_open_stops_a_new_run_before_its_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise ConfigurationError("cannot be opened")

    monkeypatch.setattr(checkpoint, "open_checkpoints", fail)
    training = dataclasses.replace(regression().training, rounds=9, checkpoint_every=0)
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        train(dataclasses.replace(regression(), training=training), tmp_path)
    rounds = [line["round"] for line in read_metrics(tmp_path) if line["kind"] == "training"]
    assert rounds and max(rounds) < 9


@pytest.mark.parametrize("content", ["[1]", '{"item_handlers": 5}'])
def test_a_damaged_time_of_a_checkpoint_is_named_and_can_be_deleted(
    folder: Path, content: str
) -> None:
    expected = load_params(folder)
    time = folder / "checkpoints" / "2" / "_CHECKPOINT_METADATA"
    time.write_text(content)
    words = f"{time} is damaged .* or delete this file alone"
    with pytest.raises(ConfigurationError, match=words):
        load_params(folder)
    with pytest.raises(ConfigurationError, match=words):
        train(short(6), folder)
    time.unlink()
    chex.assert_trees_all_equal(load_params(folder), expected)
    assert train(short(6), folder).rounds_trained == 2


@pytest.mark.parametrize(
    "damage",
    [
        "missing",
        pytest.param("longer", marks=pytest.mark.slow),
        pytest.param("shorter", marks=pytest.mark.slow),
        "other bytes",
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_offered(
    folder: Path, damage: str
) -> None:
    newest = folder / "checkpoints" / "4"
    path = max(files(newest / "state"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        changed = {"longer": content + b"x", "shorter": content[:-1], "other bytes": content[::-1]}
        path.write_bytes(changed[damage])
    words = rf"round 4 is damaged: {path.relative_to(newest)} .* or delete {newest} to resume from"
    with pytest.raises(DamagedCheckpointError, match=f"{words} the checkpoint of round 2"):
        train(short(6), folder)
    assert newest.exists()  # nothing is deleted without the user
    subprocess.run(["rm", "-r", newest], check=True)
    result = train(short(6), folder)  # the run was finished: more rounds need no permission
    assert (result.rounds, result.rounds_trained) == (6, 4)
    assert [x["round"] for x in read_metrics(folder) if x["kind"] == "training"] == [*range(1, 7)]


def reverse_bytes(checkpoint: Path) -> None:
    path = max(files(checkpoint / "state"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[::-1])


def test_a_damaged_checkpoint_is_not_offered(folder: Path) -> None:
    checkpoints = folder / "checkpoints"
    subprocess.run(["cp", "-r", checkpoints / "2", checkpoints / "1"], check=True)
    reverse_bytes(checkpoints / "4")
    reverse_bytes(checkpoints / "2")
    words = f"delete {checkpoints / '4'} and {checkpoints / '2'} to resume from the .* of round 1"
    with pytest.raises(DamagedCheckpointError, match=words):
        load_params(folder)
    reverse_bytes(checkpoints / "1")
    with pytest.raises(DamagedCheckpointError, match="start again, since no earlier checkpoint is"):
        load_params(folder)


def test_a_finished_run_with_a_damaged_checkpoint_is_not_called_finished(folder: Path) -> None:
    assert train(short(4), folder).rounds_trained == 0
    reverse_bytes(folder / "checkpoints" / "4")
    with pytest.raises(DamagedCheckpointError, match=r"round 4 is damaged.*from the .* of round 2"):
        train(short(4), folder)


def test_the_only_checkpoint_is_damaged(folder: Path) -> None:
    subprocess.run(["rm", "-r", folder / "checkpoints" / "2"], check=True)
    (folder / "checkpoints" / "4" / "checksums.json").write_text("{")
    with pytest.raises(
        DamagedCheckpointError, match=r"checksums\.json cannot be read.*start again"
    ):
        load_params(folder)


@pytest.mark.parametrize("content", [pytest.param(None, marks=pytest.mark.slow), "state"])
def test_an_unfinished_checkpoint_is_no_finished_run(
    folder: Path, content: str | None, capfd: pytest.CaptureFixture
) -> None:
    unfinished = folder / "checkpoints" / "999"
    unfinished.mkdir()
    if content:
        (unfinished / content).mkdir()
    assert latest_round(folder) == 4
    assert train(short(6), folder).rounds_trained == 2
    assert not unfinished.exists()
    assert f"Removed {unfinished}: the checkpoint is unfinished" in capfd.readouterr().err


def test_a_checkpoint_that_lost_its_checksums_is_not_deleted(
    folder: Path, capfd: pytest.CaptureFixture
) -> None:
    lost = folder / "checkpoints" / "4"
    (lost / "checksums.json").unlink()
    files = sorted(path.relative_to(lost) for path in lost.rglob("*") if path.is_file())
    assert train(short(4), folder).rounds_trained == 2  # from the checkpoint of round 2
    aside = folder / "checkpoint_4_without_checksums"
    assert sorted(path.relative_to(aside) for path in aside.rglob("*") if path.is_file()) == files
    assert f"Moved {lost} to {aside}" in capfd.readouterr().err


def test_a_closed_pipe_does_not_stop_the_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close the pipe early, as `fedpax train ... 2>&1 | head -1` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        result = train(short(6), folder)
        monkeypatch.undo()
    assert (result.finished, latest_round(folder)) == (True, 6)
