"""Tests of the lines that tell what is about to run."""

import shutil
from pathlib import Path

import pytest

from fedpax.main import main

EXP = "--exp=small_regression:regression"


def test_a_run_says_what_it_is_about_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    folder = tmp_path / "my run"
    command = ["train", EXP, f"--job_log_dir={folder}"]
    name = "small_regression:regression"
    start = [
        f"{name}: 544 parameters on 8 cpu devices, mesh clients=4, fsdp=2",
        f"{name}: folder {folder}; live view: tensorboard --logdir '{folder}/tensorboard'",
    ]
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert main([*command, "--training.rounds=3"]) == 0
    assert capsys.readouterr().err.splitlines()[:3] == [*start, f"{name}: compiling"]
    assert main([*command, "--training.rounds=4"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:4] == [*start, f"{name}: resuming from round 3", f"{name}: compiling"]
    assert main([*command, "--training.rounds=4"]) == 0
    assert capsys.readouterr().err == ""
    shutil.rmtree(folder / "checkpoints")
    assert main([*command, "--training.rounds=4"]) == 0
    again = f"{name}: no checkpoint of the 4 logged rounds: starting from round 0"
    assert capsys.readouterr().err.splitlines()[:2] == [again, start[0]]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main([*command, "--training.rounds=5"]) == 0
    assert f"{start[1]} (pip install tensorboard)" in capsys.readouterr().err.splitlines()
