"""`fedpax compare` with a group of one's own, over seeds, and the metrics of its experiments."""

import importlib
import json
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from small_runs import Command

from fedpax.commands.parts.options import configure
from fedpax.experiments.catalog import ExperimentGroup, UnknownExperimentError, expand_groups
from fedpax.main import main
from fedpax.run_files.configuration import seed_paths, with_seed
from fedpax.run_files.metrics import read_metrics, select

LEAF = Path(__file__).parent / "small_leaf.py"


@pytest.fixture
def leaf(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(LEAF, tmp_path / "leaf.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "leaf", raising=False)  # another test's file
    compare = importlib.import_module("fedpax.commands.compare")
    # In this process: `python -m fedpax train ...` is what compare runs otherwise.
    monkeypatch.setattr(compare, "run_subprocess", lambda words: main(words[3:]))
    return tmp_path


def rows(table: str) -> dict[str, list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_a_group_of_ones_own_is_compared_over_seeds(leaf: Path, command: Command) -> None:
    arguments = ["compare", "--exp=./leaf.py:two", "--job_log_dir=runs", "--seeds=0,3"]
    status, output, errors = command(*arguments)
    assert status == 0, errors
    folders = {name: [leaf / f"runs/{name}_seed_{seed}" for seed in (0, 3)] for name in two_names()}
    first, second = output.split("Metrics:")
    assert "Means ± standard deviations of 2 seeds: 0, 3." in second
    for name, result in folders.items():
        last = [select(read_metrics(folder), "evaluation")[-1] for folder in result]
        losses, accuracies = ([line[key] for line in last] for key in ("loss", "accuracy"))
        assert losses[0] != losses[1]
        mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
        assert rows(first)[name][0] == f"{mean:.4f} ± {deviation:.4f}"
        mean, deviation = statistics.fmean(accuracies), statistics.stdev(accuracies)
        assert rows(second)[name][0] == f"{mean:.4f} ± {deviation:.4f}"
        assert rows(second)["experiment"] == ["held-out accuracy", "training width"]
        seeds = [
            json.loads((folder / "config.json").read_text())["configuration"] for folder in result
        ]
        assert [one["training"]["seed"] for one in seeds] == [0, 3]
        assert [one["data"]["seed"] for one in seeds] == [0, 3]
    content = json.loads((leaf / "runs/comparison.json").read_text())
    assert [run["name"] for run in content] == list(folders)
    assert content[1]["loss_deviation"] == pytest.approx(deviation_of(folders["fast"]))
    assert content[1]["metrics"]["evaluation_deviation"].keys() == {"loss", "accuracy"}

    # A second time, all runs are finished; one metric is drawn.
    before = (leaf / "runs/comparison.png").read_bytes()
    status, output, errors = command(*arguments, "--metric=accuracy,loss")
    assert status == 0 and errors.count("is finished already") == 4 and "changed" not in errors
    assert rows(output.split("Metrics:")[1])["experiment"] == [
        "held-out accuracy", "held-out loss", "training loss",
    ]  # fmt: skip
    assert (leaf / "runs/comparison.png").read_bytes() != before
    status, _, errors = command(*arguments, "--metric=acuracy")
    assert status == 2 and "expected one of loss, accuracy, width" in errors

    # With other code, the user is told so: by compare each time, and where a run goes on, once.
    (leaf / "leaf.py").write_text((leaf / "leaf.py").read_text() + "# edited\n")
    status, _, errors = command(*arguments)
    assert status == 0 and errors.count("fedpax: leaf.py has changed since") == 4
    assert "Set another --job_log_dir to train all rounds with the new code." in errors
    more = [*arguments[:3], "--seeds=0", "--training.rounds=3"]
    status, _, errors = command(*more)
    assert status == 0 and errors.count("leaf.py has changed since") == 2, errors
    status, _, errors = command(*more)
    assert status == 0 and "has changed" not in errors

    # `show` has the same metrics, for each run; `evaluate` takes an experiment of the group.
    status, output, _ = command("show", "--job_log_dir=runs", "--metric=width")
    shown = rows(output.split("Metrics:")[1].split("Use of")[0])
    assert status == 0 and shown["experiment"] == ["training width"] and len(shown) == 5
    status, output, errors = command(
        "evaluate", "--job_log_dir=runs/slow_seed_3", "--exp=./leaf.py:two:slow"
    )
    assert status == 0, errors


def two_names() -> list[str]:
    return ["slow", "fast"]


def deviation_of(folders: list[Path]) -> float:
    last = [select(read_metrics(folder), "evaluation")[-1] for folder in folders]
    return statistics.stdev(line["loss"] for line in last)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--exp=./leaf.py:three"], "group of 3 experiments, expected one of them: rate_"),
        (["train", "--exp=./leaf.py:three:rate_1"], "Did you mean rate_0.1"),
        (["train", "--exp=./leaf.py:line:a"], "returns no ExperimentGroup"),
        (["compare", "--exp=./leaf.py:wrong"], "name 'a/b', expected letters"),
        (["compare", "--exp=./leaf.py:numbers"], "name 1, expected letters"),
        (["compare", "--exp=./leaf.py:listed"], "is a group of a list, expected a dict"),
        (["compare", "--exp=./leaf.py:functions"], "'a' of the group is a function"),
        (["compare", "--exp=./leaf.py:two", "--seeds=0,0"], "expected different integers"),
        (["compare", "--exp=./leaf.py:two", "--seeds=a"], "expected different integers"),
        (["compare", "--exp=./leaf.py:two", "--seeds=1", "--seed=2"], "Leave out --seed"),
        (["train", "--exp=./leaf.py:line", "--seed=x"], "--seed=x is not an integer"),
    ],
)
def test_wrong_groups_and_seeds_are_named(
    leaf: Path, command: Command, arguments: list[str], words: str
) -> None:
    status, _, errors = command(*arguments, "--job_log_dir=runs")
    assert status == 2 and words in errors, errors


def test_the_names_and_the_target_of_a_group_of_ones_own(leaf: Path, command: Command) -> None:
    names = [f"./leaf.py:three:rate_{rate}" for rate in (0.1, 0.2, 0.3)]
    assert expand_groups(["./leaf.py:three", "./leaf.py:line"]) == [*names, "./leaf.py:line"]
    assert command("list", "./leaf.py:three")[1].split() == names
    status, output, _ = command("compare", "--exp=./leaf.py:three", "--job_log_dir=runs")
    assert status == 0 and "rounds to accuracy 0.1" in output
    assert rows(output.split("rounds to")[0])["rate_0.3"]


def test_one_seed_sets_all_but_those_that_are_stated(leaf: Path) -> None:
    plain = configure("./leaf.py:line", [])
    assert list(seed_paths(plain)) == ["training.seed", "data.seed", "data.shuffle_seed"]
    for words in (["--seed=7"], ["--seed", "7"], ["--seed=1", "--seed=7"]):
        assert configure("./leaf.py:line", words) == with_seed(plain, 7)
    some = configure("./leaf.py:line", ["--data.seed=5", "--seed=7", "--rate=0.5"])
    assert (some.training.seed, some.data.seed, some.data.shuffle_seed) == (7, 5, 7)


def test_seeds_of_shipped_experiments() -> None:
    experiment = configure("fedavg_digits", ["--seed=4"])
    assert {path: 4 for path in seed_paths(experiment)} == {"training.seed": 4, "cohort.seed": 4}


def test_an_empty_group_raises(leaf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("./leaf.py:line", [])  # imports the file
    monkeypatch.setattr(sys.modules["leaf"], "two", lambda: ExperimentGroup({}))
    with pytest.raises(UnknownExperimentError, match="a group of 0 experiments"):
        expand_groups(["leaf:two"])


def test_rows_that_a_flag_makes_equal_are_told(leaf: Path, command: Command) -> None:
    arguments = ["compare", "--exp=./leaf.py:two", "--job_log_dir=runs", "--training.rounds=1"]
    status, _, errors = command(*arguments, "--rate=0.5")
    assert status == 0
    first, second = sorted(two_names())
    words = f"fedpax: with --training.rounds=1 --rate=0.5, {first} and {second} are one experiment"
    assert words in errors
