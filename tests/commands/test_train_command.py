"""`fedpax train` and `fedpax compare` in this process, and on simulated devices."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import EVERY, Command

from fedpax.commands.parts.options import configure
from fedpax.experiments.catalog import find_experiment
from fedpax.run_files.configuration import read_configuration
from fedpax.run_files.metrics import read_metrics
from fedpax.run_files.paths import METRICS

HERE = Path(__file__).parent.parent
REGRESSION = "small_regression:regression"

Run = Callable[..., tuple[int, str, str]]


def test_overrides_reach_nested_fields_in_either_spelling(run: Run) -> None:
    find_experiment(REGRESSION)
    changed = configure(
        REGRESSION,
        ["--model.hidden", "7", "--mesh.clients=-1", "--training.stop_on_non_finite=False"],
    )
    assert (changed.model.hidden, changed.mesh.clients) == (7, -1)
    assert changed.training.stop_on_non_finite is False
    assert changed.model.features == configure(REGRESSION, []).model.features


def test_a_run_is_trained_resumed_and_refused(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ("train", f"--exp={REGRESSION}", f"--job_log_dir={folder}", "--model.hidden", "6")
    status, output, errors = run(*command, "--training.rounds=4")
    assert status == 0 and f"Finished 4 of 4 rounds in {folder}: held-out loss" in output
    assert "round 4/4: held-out loss" in errors
    name, configuration = read_configuration(folder, configure(REGRESSION, []))
    assert (name, configuration.model.hidden) == (REGRESSION, 6)
    assert configuration == configure(REGRESSION, ["--model.hidden=6", "--training.rounds=4"])

    status, output, _ = run(*command, "--training.rounds=4")
    assert (status, output) == (0, f"Nothing to do: {folder} holds all 4 of 4 rounds.\n")

    status, output, errors = run(*command, "--training.rounds=5", "--learning_rate=0.02")
    assert (status, output) == (2, "")
    assert "learning_rate: 0.01 -> 0.02" in errors
    assert "training.rounds" not in errors  # a finished run takes more rounds
    assert "--allow_config_change=learning_rate" in errors

    status, output, _ = run(
        *command,
        "--training.rounds=5",
        "--learning_rate=0.02",
        "--allow_config_change=learning_rate",
    )
    assert status == 0 and "Finished 5 of 5 rounds" in output
    fewer = ("--training.rounds=3", "--learning_rate=0.01", "--allow_config_change=learning_rate")
    assert run(*command, *fewer)[0] == 2
    status, output, _ = run(*command, *fewer, "--allow_config_change=training")
    held = "holds 5 rounds, more than the 3 of the experiment"
    assert (status, output) == (0, f"Nothing to do: {folder} {held}.\n")

    status, output, errors = run(
        "train", "--exp=small_regression:single_client", f"--job_log_dir={folder}"
    )
    assert (status, output) == (2, "")
    assert f"another experiment, --exp={REGRESSION}" in errors and "hidden" not in errors


def test_a_loss_that_is_not_finite_is_an_error(run: Run, tmp_path: Path) -> None:
    folder = f"--job_log_dir={tmp_path}"
    status, output, errors = run("train", f"--exp={REGRESSION}", folder, "--learning_rate=50")
    assert (status, output) == (1, "")
    assert "stopped: the loss of round" in errors and "smaller learning rate" in errors


def test_compare_names_metrics_that_are_missing(
    command: Command, regression: Path, tmp_path: Path
) -> None:
    arguments = ("compare", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}", *EVERY)
    status, table, errors = command(*arguments)
    assert status == 0 and errors.startswith(f"{REGRESSION} is finished already.\n")
    assert METRICS not in errors
    lines = (regression / METRICS).read_text().splitlines(keepends=True)
    (regression / METRICS).write_text("".join(lines[:4]))
    status, shorter, errors = command(*arguments)
    assert status == 0 and shorter != table
    assert f"{regression / METRICS} ends at round 2, expected round 4, which is saved" in errors


@pytest.mark.slow
def test_compare_trains_unfinished_experiments_and_writes_the_files(
    run: Run, tmp_path: Path
) -> None:
    settings = ("--training.rounds=4", "--training.evaluate_every=2")
    folder = f"--job_log_dir={tmp_path / 'regression'}"
    assert run("train", f"--exp={REGRESSION}", folder, *settings)[0] == 0
    before = (tmp_path / "regression" / "metrics.jsonl").read_bytes()

    both = f"--exp={REGRESSION},small_regression:single_client"
    status, output, errors = run("compare", both, f"--job_log_dir={tmp_path}", *settings)
    assert status == 0
    assert "is finished already" in errors
    assert (tmp_path / "regression" / "metrics.jsonl").read_bytes() == before
    assert len(read_metrics(tmp_path / "single_client")) == 1 + 4 + 2
    # The second table has the metrics that the losses of the two experiments return.
    first, second = output.split("\n\nMetrics:\n")
    for table in (first, second):
        names = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("|")]
        assert names[0] == "experiment" and names[2:] == ["regression", "single_client"]
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content[0]["bytes_across_placement"] > 0 == content[1]["bytes_across_placement"]
    assert (tmp_path / "comparison.png").exists()

    status, _, errors = run("compare", both, f"--job_log_dir={tmp_path}", "--training.rounds=4")
    assert status == 2 and "training.evaluate_every: 2 -> 4" in errors
    allow = "--allow_config_change=training.evaluate_every"
    status, _, errors = run(
        "compare", both, f"--job_log_dir={tmp_path}", "--training.rounds=4", allow
    )
    assert status == 0 and errors.count("is finished already") == 2


@pytest.mark.parametrize(
    ("variables", "mesh", "status", "words"),
    [
        ({}, "--mesh.clients=3", 0, "Finished"),
        pytest.param(
            {"JAX_NUM_CPU_DEVICES": "2"},
            "--mesh.clients=3",
            2,
            "needs 6 devices, but there are 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
            "--mesh.clients=4",
            2,
            "unset XLA_FLAGS and JAX_NUM_CPU_DEVICES",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_cpu_simulates_the_devices_of_the_mesh(
    tmp_path: Path, variables: dict[str, str], mesh: str, status: int, words: str
) -> None:
    removed = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in removed}
    settings = [f"--job_log_dir={tmp_path}", mesh, "--clients=12", "--training.rounds=1"]
    process = subprocess.run(
        [sys.executable, "-m", "fedpax.main", "train", f"--exp={REGRESSION}", *settings],
        cwd=HERE,
        env=environment | variables,
        capture_output=True,
        text=True,
    )
    assert process.returncode == status, process.stderr
    assert words in process.stdout + process.stderr
