"""The commands of docs/huggingface.md, run one after another in an empty folder."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.models import huggingface
from fedpax.run_files.metrics import read_metrics, select

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
# The weights of Llama are not here, and a whole run takes minutes.
NOT_RUN = "models/llama"
FEWER = {
    "pretrain_text": ["--training.rounds=6"],
    "fedavg_lora_text": ["--training.rounds=4"],
    "diloco_lora_text": ["--training.rounds=8"],
}


def run(*arguments: str) -> int:
    """Run a command in a process of its own, because a process sets its devices only once."""
    return subprocess.run([sys.executable, "-m", "fedpax.main", *arguments]).returncode


def test_the_commands_of_the_page_run_and_adapters_lower_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    commands = [line for line in "".join(blocks).splitlines() if NOT_RUN not in line]
    assert len(commands) == 7
    for command in commands:
        program, *arguments = shlex.split(command)
        exp = next((word.partition("=")[2] for word in arguments if "--exp=" in word), "")
        assert program == "fedpax" and run(*arguments, *FEWER.get(exp, [])) == 0

    def losses(name: str) -> list[float]:
        lines: list[dict[str, Any]] = select(read_metrics(tmp_path / "runs" / name), "evaluation")
        return [line["loss"] for line in lines]

    base = losses("base")[-1]
    assert losses("lora")[-1] < base - 0.02
    assert losses("diloco_lora")[-1] < base - 0.02
    config, params = huggingface.load("models/base")
    merged_config, merged = huggingface.load("models/adapted")
    assert merged_config == config
    query, other = (tree["layers"]["attention"]["query"] for tree in (params, merged))
    assert query.dtype == other.dtype == np.float32 and (query != other).any()
    # A run that goes on from the merged model begins at the adapters' loss, and resumes without it.
    continued = ["train", "--exp=pretrain_text", "--model.weights=models/adapted"]
    continued += ["--job_log_dir=runs/continued", "--optimizer.learning_rate=1e-9"]
    continued += ["--data.local_steps=1"]
    assert run(*continued, "--training.rounds=1") == 0
    assert losses("continued")[-1] == pytest.approx(losses("lora")[-1], abs=1e-3)
    Path("models/adapted").rename("models/moved")
    assert run(*continued, "--training.rounds=2") == 0
    assert len(losses("continued")) == 2
    assert run("evaluate", "--job_log_dir=runs/continued") == 0
    # Adapters need the folder; it may have moved.
    Path("models/base").rename("models/base2")
    assert run("evaluate", "--job_log_dir=runs/lora") == 2
    moved = ["--job_log_dir=runs/lora", "--model.weights=models/base2"]
    assert run("generate", *moved, "--prompt=def ", "--num_tokens=5") == 0
