"""Finished runs for the commands that read them, and a function that runs a command."""

import fcntl
import os
import shutil
import sys
from pathlib import Path

import pytest
from small_runs import EVERY, EXPERIMENTS, REGRESSION, TINY_TRANSFORMER, Command

from fedpax.main import main


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Command:
    """Run a command in this process; return its status, output and errors."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(EXPERIMENTS)
    monkeypatch.setenv("XLA_FLAGS", "")  # restored after the test

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return call


def train_once(factory: pytest.TempPathFactory, name: str, *arguments: str) -> Path:
    """Train in the first worker that needs the run; the others wait for it and read it."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    run, is_trained = folder / name, folder / f"{name}.trained"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_trained.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "path", list(sys.path))
                patch.chdir(EXPERIMENTS)
                patch.setenv("XLA_FLAGS", "")
                assert main(["train", f"--job_log_dir={run}", *arguments]) == 0
            is_trained.touch()
    return run


@pytest.fixture(scope="session")
def trained_regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_once(tmp_path_factory, "regression", f"--exp={REGRESSION}", *EVERY)


@pytest.fixture(scope="session")
def trained_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mesh = ("--mesh.islands=4", "--mesh.fsdp=2")  # all simulated devices, as later commands need
    settings = (*TINY_TRANSFORMER, *mesh, "--training.rounds=2", "--training.evaluate_every=1")
    return train_once(tmp_path_factory, "text", "--exp=diloco_text", *settings)


@pytest.fixture
def regression(trained_regression: Path, tmp_path: Path) -> Path:
    """Return a copy, so that a test can damage it."""
    return Path(shutil.copytree(trained_regression, tmp_path / "regression"))


@pytest.fixture
def text(trained_text: Path, tmp_path: Path) -> Path:
    """Return a copy, so that a test can damage it."""
    return Path(shutil.copytree(trained_text, tmp_path / "text"))
