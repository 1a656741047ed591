"""Commands that read a run while another process trains it."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import EXPERIMENTS, NAMED, TINY_TRANSFORMER, Command

from fedpax.checkpoints.saved_state import load_params
from fedpax.commands.parts import saved_run
from fedpax.models import huggingface
from fedpax.run_files.paths import complete_rounds, latest_round
from fedpax.training.folder_owners import JobDirLock

TRAIN = (sys.executable, "-m", "fedpax", "train", "--exp=diloco_text")


def test_a_checkpoint_that_the_run_removes_meanwhile_is_named_with_a_remedy(
    command: Command, regression: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_and_load(*arguments: Any) -> Any:
        shutil.rmtree(regression / "checkpoints" / "2")
        return load_params(*arguments)

    monkeypatch.setattr(saved_run, "load_params", remove_and_load)
    with JobDirLock(regression):
        status, output, errors = command(
            "evaluate", NAMED, f"--job_log_dir={regression}", "--round=2"
        )
    assert (status, output) == (2, "")
    assert "has removed it or was removing it" in errors and "of round 4" in errors
    assert "--training.keep_every" in errors


@pytest.mark.slow
def test_a_model_is_exported_while_the_run_trains(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fields = (
        "--training.rounds=100000",
        "--training.checkpoint_every=1",
        "--training.keep_checkpoints=1",
        "--training.keep_every=3",
    )
    train = subprocess.Popen(
        [*TRAIN, f"--job_log_dir={folder}", *TINY_TRANSFORMER, *fields],
        cwd=EXPERIMENTS,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    try:
        while (latest_round(folder) or 0) < 4:
            assert train.poll() is None
            time.sleep(0.1)
        out = tmp_path / "exported"
        status, output, _ = command(
            "export", f"--job_log_dir={folder}", f"--out={out}", "--round=3"
        )
        assert status == 0 and "round 3" in output and train.poll() is None
        while (latest_round(folder) or 0) < 8:
            assert train.poll() is None  # training continues
            time.sleep(0.1)
    finally:
        train.terminate()
        train.wait()
    rounds = complete_rounds(folder / "checkpoints")
    assert [number for number in rounds if number % 3] in ([], rounds[-1:])  # the newest alone
    assert rounds[:2] == [3, 6]
    _, params = huggingface.load(out)
    np.testing.assert_array_equal(params["embedding"], load_params(folder, 3)["embedding"])
    assert not np.array_equal(params["embedding"], load_params(folder, rounds[-1])["embedding"])
