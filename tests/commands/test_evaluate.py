"""Tests of `fedpax evaluate`."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import chex
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_runs import EVERY, NAMED, REGRESSION, Command

from fedpax.checkpoints import load_params
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.compiled_round import with_shardings
from fedpax.training.folder_owners import JobDirLock


def heldout_loss(output: str) -> float:
    match = re.search(r"held-out loss ([0-9.]+)", output)
    assert match
    return float(match[1])


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["regression", pytest.param("text", marks=pytest.mark.slow)])
def test_the_metrics_are_those_of_the_runs_own_evaluations(
    command: Command, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    folder = request.getfixturevalue(kind)
    named = [NAMED] if kind == "regression" else []
    before = snapshot(folder)
    evaluations = select(read_metrics(folder), "evaluation")
    rounds = {line["round"]: line for line in evaluations}
    newest = max(rounds)
    status, output, errors = command(
        "evaluate", *named, f"--job_log_dir={folder}", f"--json={tmp_path / 'new' / 'metrics.json'}"
    )
    content = json.loads((tmp_path / "new" / "metrics.json").read_text())
    assert status == 0
    names = {"loss"} if kind == "regression" else {"loss", "perplexity"}
    assert content["metrics"] == {name: rounds[newest][name] for name in names}
    assert (content["round"], content["job_log_dir"]) == (newest, str(folder))
    loss = f"{rounds[newest]['loss']:.4f}"
    assert output.startswith(f"{content['exp']} round {newest}: held-out loss {loss}")
    assert f"evaluating round {newest} on 8 cpu devices" in errors
    assert snapshot(folder) == before


def test_a_newer_checkpoint_that_is_incomplete_is_named(command: Command, regression: Path) -> None:
    newest = regression / "checkpoints" / "4"
    (newest / "checksums.json").unlink()
    status, output, errors = command("evaluate", NAMED, f"--job_log_dir={regression}")
    assert status == 0 and " round 2: " in output
    assert f"{newest} has no checksums.json" in errors and "is read, of round 2. If a" in errors
    assert (
        "checksums" not in command("evaluate", NAMED, f"--job_log_dir={regression}", "--round=2")[2]
    )
    with JobDirLock(regression):  # a run may be writing it
        assert "checksums" not in command("evaluate", NAMED, f"--job_log_dir={regression}")[2]


def test_an_earlier_round_can_be_evaluated(command: Command, regression: Path) -> None:
    first, last = (line["loss"] for line in select(read_metrics(regression), "evaluation"))
    status, output, _ = command("evaluate", NAMED, f"--job_log_dir={regression}", "--round=2")
    assert first != last
    assert (status, output) == (0, f"{REGRESSION} round 2: held-out loss {first:.4f}\n")


def test_fields_can_be_overridden(command: Command, text: Path) -> None:
    whole = select(read_metrics(text), "evaluation")[-1]["loss"]
    folder = f"--job_log_dir={text}"
    status, output, errors = command(
        "evaluate", folder, "--mesh.islands=4", "--mesh.fsdp=1", "--mesh.data=2"
    )
    assert status == 0 and "on 8 cpu devices, mesh islands=4, data=2" in errors
    assert heldout_loss(output) == pytest.approx(whole, abs=1e-3)
    again = ("--data.heldout_tokens=128", "--data.heldout_sets", "again=stdlib_text")
    status, output, _ = command("evaluate", folder, *again)
    loss = heldout_loss(output)
    assert status == 0 and loss != pytest.approx(whole, abs=1e-4)
    perplexities = re.findall(r"perplexity ([0-9.]+)", output)
    assert [float(x) for x in perplexities] == pytest.approx([math.exp(loss)] * 2, rel=1e-4)
    assert f", heldout/again/loss {loss:.4f}, heldout/again/perplexity" in output


def test_a_run_can_be_evaluated_while_it_trains(command: Command, regression: Path) -> None:
    unfinished = regression / "checkpoints" / "6.orbax-checkpoint-tmp"
    unfinished.mkdir()
    with JobDirLock(regression):
        status, output, _ = command("evaluate", NAMED, f"--job_log_dir={regression}")
    assert status == 0 and "round 4: held-out loss" in output
    assert unfinished.exists()


def test_code_that_has_moved_is_found_by_exp(
    command: Command, regression: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = regression / "config.json"
    path.write_text(path.read_text().replace(f'"{REGRESSION}"', '"./gone.py:regression"'))
    monkeypatch.chdir(tmp_path)
    status, _, errors = command("evaluate", f"--job_log_dir={regression}")
    assert status == 2 and "names the experiment ./gone.py:regression, which does not" in errors
    here = Path(__file__).parent.parent / "small_regression.py"
    status, output, _ = command(
        "evaluate", f"--job_log_dir={regression}", f"--exp={here}:regression"
    )
    assert status == 0 and "round 4: held-out loss" in output


@pytest.mark.parametrize("name", ["evaluate", "generate"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--job_log_dir is missing, expected a folder"),
        (("--job_log_dir=nowhere",), "--job_log_dir=nowhere does not exist, expected the folder"),
        ((f"--job_log_dir={__file__}",), "test_evaluate.py is a file, expected the folder"),
        (("--job_log_dir=s3://bucket/run",), "expected gs://BUCKET/FOLDER"),
        (("--job_log_dir=.",), "--job_log_dir=. holds no run, expected a folder with config.json"),
        (("--job_log_dir=.", "--round=last"), "--round"),
    ],
)
def test_folders_that_are_refused(
    command: Command, name: str, arguments: tuple[str, ...], words: str
) -> None:
    status, output, errors = command(name, *arguments)
    assert (status, output) == (2, "")
    assert errors.startswith("fedpax: ") and words in errors


def test_a_folder_without_a_checkpoint_is_refused(command: Command, regression: Path) -> None:
    shutil.rmtree(regression / "checkpoints")
    status, output, errors = command("evaluate", NAMED, f"--job_log_dir={regression}")
    assert (status, output) == (2, "")
    assert "has no complete checkpoint" in errors and "train on, then run `fedpax eval" in errors


def test_a_folder_without_its_configuration_is_refused(command: Command, regression: Path) -> None:
    (regression / "config.json").unlink()
    status, output, errors = command("evaluate", NAMED, f"--job_log_dir={regression}")
    assert (status, output) == (2, "")
    assert "has checkpoints but no config.json" in errors
    assert "start the run's former command again, which writes it" in errors
    assert command("train", f"--exp={REGRESSION}", f"--job_log_dir={regression}", *EVERY)[0] == 0
    assert command("evaluate", NAMED, f"--job_log_dir={regression}")[0] == 0


def test_a_round_without_a_checkpoint_is_refused(command: Command, regression: Path) -> None:
    status, _, errors = command("evaluate", NAMED, f"--job_log_dir={regression}", "--round=3")
    assert status == 2 and "--round=3 has no checkpoint" in errors and "one of 2, 4" in errors


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_offered(
    command: Command, regression: Path
) -> None:
    largest = max((regression / "checkpoints" / "4").rglob("d/*"), key=os.path.getsize)
    largest.write_bytes(bytes(byte ^ 1 for byte in largest.read_bytes()))
    status, output, errors = command("evaluate", NAMED, f"--job_log_dir={regression}")
    assert (status, output) == (2, "")
    assert (
        "checkpoint of round 4 is damaged" in errors
        and "--round=2 reads the newest whole one" in errors
    )
    assert command("evaluate", NAMED, f"--job_log_dir={regression}", "--round=2")[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 1, "exp"',
        '{"version": 1, "exp": 3, "configuration": {"class": "a:B"}}',
        '{"version": 1, "exp": "a", "configuration": {"class": 3}}',
    ],
)
def test_a_damaged_configuration_is_refused(command: Command, regression: Path, text: str) -> None:
    (regression / "config.json").write_text(text)
    status, _, errors = command("evaluate", NAMED, f"--job_log_dir={regression}")
    assert status == 2 and "config.json cannot be read" in errors


@pytest.mark.parametrize("exp", ["fedavg_digits", "small_regression:single_client"])
def test_another_experiments_folder_is_refused(
    command: Command, regression: Path, exp: str
) -> None:
    status, _, errors = command("evaluate", f"--exp={exp}", f"--job_log_dir={regression}")
    assert status == 2
    assert f"holds another experiment, --exp={REGRESSION}, expected --exp={exp}" in errors


def test_the_parameters_of_another_model_are_refused(command: Command, regression: Path) -> None:
    status, _, errors = command(
        "evaluate", NAMED, f"--job_log_dir={regression}", "--model.hidden=6"
    )
    assert status == 2 and "hidden has shape [16, 32], expected [16, 6]" in errors


def test_an_unknown_flag_names_the_commands_own(command: Command, text: Path) -> None:
    status, _, errors = command("evaluate", f"--job_log_dir={text}", "--jsn=x")
    assert status == 2 and "Unrecognized options: --jsn" in errors
    listed = re.search(r"`fedpax evaluate` takes (.*) and the fields", errors)
    assert listed is not None
    own = "beam_flags by_client chunk_size engine exp flower_flags job_log_dir json picture round"
    assert sorted(listed[1].split(", ")) == [f"--{name}" for name in own.split()]


def test_help_shows_the_fields_with_the_values_of_the_folder(command: Command, text: Path) -> None:
    status, output, _ = command("evaluate", f"--job_log_dir={text}", "--help")
    assert status == 0 and f"The configuration of diloco_text in {text}"[:60] in output
    assert "--data.seq_len INT" in output and "(default: 16)" in output
    status, output, _ = command("evaluate", "--help")
    assert status == 0 and "fedpax evaluate --job_log_dir=DIR" in output


def test_parameters_are_loaded_onto_shardings(
    command: Command, regression: Path, clients_fsdp: Callable[[], Mesh]
) -> None:
    params = load_params(regression)
    spec = {"hidden": PartitionSpec(None, "fsdp"), "out": PartitionSpec("fsdp")}
    shardings = {name: NamedSharding(clients_fsdp(), axes) for name, axes in spec.items()}
    like = with_shardings(params, shardings)
    loaded = load_params(regression, 4, like)
    chex.assert_trees_all_equal(loaded, params)
    assert {name: leaf.sharding for name, leaf in loaded.items()} == shardings
    with pytest.raises(ValueError, match="out in only one of them"):
        load_params(regression, 4, {"hidden": like["hidden"]})


@pytest.mark.parametrize("method", ["ditto", "hypcluster"])
def test_engines_say_that_own_models_are_not_measured(
    command: Command, method: str, tmp_path: Path
) -> None:
    rows = "\n".join(f"{i % 7},{i % 2}" for i in range(60))
    for client in "ab":
        (tmp_path / f"{client}.csv").write_text(f"x,y\n{rows}\n")
    run = f"--job_log_dir={tmp_path / 'run'}"
    files = f"--data.files={tmp_path}/*.csv", "--data.label=y", "--data.heldout_fraction=0.3"
    trained = ["--exp=fedavg_table", *files, f"--method={method}", "--training.rounds=1", run]
    assert command("train", *trained)[0] == 0
    status, output, errors = command("evaluate", run, "--by_client", "--engine=out_of_core")
    if method == "ditto":
        assert status == 0 and "Measures the shared model alone" in errors
        assert "accuracy" in output and "personal_accuracy" not in output
    else:
        assert status == 2 and "own models are in the checkpoint" in errors
