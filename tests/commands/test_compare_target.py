"""`fedpax compare` with a target."""

import json
from pathlib import Path

import pytest
from small_runs import EVERY, REGRESSION, Command

from fedpax.commands.compare import _find_target
from fedpax.reports.target import Target


def test_a_finished_run_is_compared_to_a_target(
    command: Command, regression: Path, tmp_path: Path
) -> None:
    arguments = ("compare", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}", *EVERY)
    status, output, _ = command(*arguments, "--target=loss=1e9")
    assert status == 0 and "rounds to loss 1e+09" in output
    (run,) = json.loads((tmp_path / "target.json").read_text())["runs"]
    assert run["name"] == "regression" and run["rounds"] == 2
    assert run["num_bytes"] is None  # its round is no fedpax program
    assert (tmp_path / "target.png").exists()

    status, _, errors = command(*arguments, "--target=accuracy=0.5")
    assert status == 2 and "no evaluation has the metric 'accuracy', expected one of" in errors
    status, _, errors = command(*arguments, "--target=0.5")
    assert status == 2 and "is no target" in errors


@pytest.mark.slow
def test_the_experiments_of_a_group_are_trained_and_compared(
    command: Command, tmp_path: Path
) -> None:
    few = ("--training.rounds=2", "--training.evaluate_every=1", f"--job_log_dir={tmp_path}")
    status, output, _ = command("compare", "--exp=personal_digits", "--target=accuracy=0", *few)
    assert status == 0 and "rounds to accuracy 0" in output
    runs = {run["name"]: run for run in json.loads((tmp_path / "target.json").read_text())["runs"]}
    assert set(runs) == {"ditto", "apfl", "hypcluster", "per_fedavg", "reptile"}
    assert all(run["rounds"] == 1 for run in runs.values())
    # The personal models stay with the clients, and take a second gradient; their loss is sent.
    assert runs["ditto"]["num_bytes"] == runs["reptile"]["num_bytes"] + 10 * 4
    assert 1.9 < runs["ditto"]["flops"] / runs["reptile"]["flops"] < 2.5


def test_a_group_sets_the_target_where_it_is_named_alone() -> None:
    assert _find_target(None, ["methods_digits"]) == Target("accuracy", 0.85)
    assert _find_target("loss=1", ["methods_digits"]) == Target("loss", 1.0)
    assert _find_target(None, ["methods_digits", "fedavg_digits"]) is None
