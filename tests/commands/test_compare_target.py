"""`fedpax compare` with a target."""

import json
from pathlib import Path

import pytest
from small_runs import EVERY, REGRESSION, Command

from fedpax.commands.compare import _find_target
from fedpax.reports.target import Target
from fedpax.run_files.metrics import read_metrics, select


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


@pytest.mark.slow
def test_methods_are_compared_by_the_bytes_of_their_models_over_seeds(
    command: Command, tmp_path: Path
) -> None:
    names = ("fedavg", "scaffold")
    few = ("--training.rounds=25", "--client_learning_rate=0.03", f"--job_log_dir={tmp_path}")
    chosen = ",".join(f"methods_synthetic:{name}" for name in names)
    compare = ("compare", f"--exp={chosen}", "--seeds=0,2", "--target=accuracy=0.7", *few)
    status, output, errors = command(*compare)
    assert status == 0, errors
    table = output.partition("rounds to accuracy 0.7")[2]
    assert table.index("| scaffold") < table.index("| fedavg")
    runs = {run["name"]: run for run in json.loads((tmp_path / "target.json").read_text())["runs"]}
    params = 4 * (60 * 10 + 10)
    for name, run in runs.items():
        lines = select(read_metrics(tmp_path / name), "evaluation")
        values, rounds = [line["accuracy"] for line in lines], run["rounds"]
        assert values[rounds - 1] >= 0.7 > max(values[: rounds - 1])
        # Down and up, with the metrics (and the sum of weights) beside the update.
        copies = 2 if run["experiment"] == "scaffold" else 1
        assert 0 < run["num_bytes"] / rounds / 10 - 2 * copies * params <= 12
        assert run["flops"] > 0
    assert runs["scaffold_seed_0"]["rounds"] < runs["fedavg_seed_0"]["rounds"]
    assert len({run["best"] for run in runs.values()}) == 4


def test_a_group_sets_the_target_where_it_is_named_alone() -> None:
    assert _find_target(None, ["methods_digits"]) == Target("accuracy", 0.85)
    assert _find_target("loss=1", ["methods_digits"]) == Target("loss", 1.0)
    assert _find_target(None, ["methods_digits", "fedavg_digits"]) is None
