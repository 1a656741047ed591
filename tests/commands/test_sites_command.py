"""Tests of `fedpax sites`."""

import json
from pathlib import Path

import pytest
from small_runs import Command

from fedpax.transport.admission import read_expulsions


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a syncer with the islands of two certificates."""
    (tmp_path / "config.json").write_text("{}")
    fields = {"state": "training", "shard": 0, "steps": 4, "loss": 1.0, "contributed": 2}
    fields |= {"late": 0, "dropped": 1, "seconds_since_message": 0.5}
    islands = [
        {"name": "a", "site": "hospital-1"} | fields,
        {"name": "b", "site": "hospital-2"} | fields | {"shard": 1},
    ]
    (tmp_path / "islands.json").write_text(json.dumps(islands))
    return tmp_path


def test_sites_are_listed_expelled_and_admitted(command: Command, run: Path) -> None:
    folder = f"--job_log_dir={run}"
    status, output, errors = command("sites", "list", folder)
    assert (status, errors) == (0, "")
    assert "| hospital-1 |      a | training |" in output and "Expelled" not in output
    assert command("sites", "expel", "hospital-2", folder, "--reason=it left")[:2] == (
        0,
        "Site hospital-2 is expelled. `fedpax sites admit hospital-2` lets it return.\n",
    )
    assert read_expulsions(run)["hospital-2"].reason == "it left"
    output = command("sites", "list", folder)[1]
    assert "Expelled:\n" in output and "| command | it left |" in output
    assert command("sites", "admit", "hospital-2", folder)[0] == 0
    assert read_expulsions(run) == {}
    status, output, errors = command("sites", "expel", "hospital-9", folder)
    assert "No site hospital-9 has joined so far. Joined: hospital-1, hospital-2." in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "got 'no action', expected list, expel NAME or admit NAME"),
        (("expel",), "got 'expel', expected list"),
        (("list", "a"), "got 'list a'"),
        (("remove", "a"), "got 'remove a'"),
        (("list", "--job_logdir=x"), "Did you mean --job_log_dir?"),
        (("list", "--exp=x"), "expected list"),
        (("list",), "--job_log_dir is missing"),
        (("list", "--job_log_dir=none"), "does not exist"),
        (("list", "--job_log_dir=."), "holds no run, expected the folder of a syncer"),
        (("admit", "a", "--job_log_dir={run}"), "site 'a' is not expelled"),
        (("expel", "a", "--job_log_dir={run}"), "Run `fedpax sites expel hospital-1`"),
        (("expel", "a\x1b", "--job_log_dir={run}"), "printable characters"),
    ],
)
def test_arguments_that_are_refused(
    command: Command,
    run: Path,
    arguments: tuple[str, ...],
    words: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    status, output, errors = command("sites", *(text.format(run=run) for text in arguments))
    assert (status, output) == (2, "") and words in errors
    assert read_expulsions(run) == {}
