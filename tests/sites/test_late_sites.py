"""A site that joins after the first round, or returns, is compared as at the start."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.main import main
from fedpax.run_files.configuration import read_configuration, write_configuration
from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.run_coordinator import _open_exchange
from fedpax.sites.site_files import read_federation, write_federation
from fedpax.sites.site_process import Identity
from fedpax.sites.site_table import SiteTable
from fedpax.sites.task_exchange import TaskExchange
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message
from sites.federation import Federation, Line, run, write_hospitals
from sites.test_equals_training import experiment

SIZES = {"a": (40, 25), "b": (33,), "late": (30, 21)}


class Late(Line):
    """A line of a site that joins in the second round."""

    def call(self, message: Message, timeout: float) -> Message:
        while message.header["kind"] == "join" and self._exchange.round < 2:
            time.sleep(0.01)
        return super().call(message, timeout)


class Lasting(Line):
    """A line of a site whose reply to a round waits until the late site has heard of its own."""

    def call(self, message: Message, timeout: float) -> Message:
        if message.header["kind"] == "reply" and self._exchange.round == 2:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and not self._is_settled():
                time.sleep(0.01)
        return super().call(message, timeout)

    def _is_settled(self) -> bool:
        site = self._exchange.sites.get("late")
        return self._exchange.has_refused or (site is not None and site.ready)


def change(folder: Path, edit: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Change each row of the files of a folder."""
    for path in folder.iterdir():
        head, *rows = [line.split(",") for line in path.read_text().splitlines()]
        edited = [edit(dict(zip(head, row, strict=True))) for row in rows]
        lines = [[*edited[0]], *([*row.values()] for row in edited)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))


def join_late(
    folder: Path, rounds: int, edit: Callable[[dict[str, str]], dict[str, str]]
) -> Federation:
    write_hospitals(folder / "data", SIZES)
    change(folder / "data" / "late", edit)
    sites = {s: experiment(f"{folder}/data/{s}/*.csv", rounds=rounds) for s in SIZES}
    return run(
        experiment(rounds=rounds),
        sites,
        folder / "runs",
        rules=RoundRules(2, 60.0),
        lines={"late": Late, "a": Lasting},
        may_be_refused=["late"],
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda row: row | {"sex": str(int(row["sex"] == "m"))},
            "the column 'sex' is 'number:mean' at this site, expected 'text', as the first sites",
        ),
        (
            lambda row: row | {"age": f"{row['age']} years"},
            "the column 'age' is 'text' at this site, expected 'number:mean', as the first sites",
        ),
        (
            lambda row: {name: value for name, value in row.items() if name != "dose"},
            "the column 'dose' is 'absent' at this site, expected 'number:mean'",
        ),
    ],
    ids=["codes", "text", "absent"],
)
def test_a_late_site_with_other_columns_is_refused(tmp_path: Path, edit: Any, words: str) -> None:
    outcome = join_late(tmp_path, 2, edit)
    assert f"site 'late': {words}" in outcome.refused["late"]
    lines = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    assert [line["sites"] for line in lines] == [2, 2]
    # Its clients are not in the population, whose size divides a private mean.
    saved = read_federation(tmp_path / "runs" / "coordinator")
    assert saved is not None and [site["name"] for site in saved["sites"]] == ["a", "b"]
    assert outcome.coordinator.exchange.sites.num_clients == 3


def test_a_late_site_with_an_empty_column_is_told(tmp_path: Path, notes: list[str]) -> None:
    outcome = join_late(tmp_path, 3, lambda row: row | {"dose": ""})
    assert not outcome.refused
    assert "site late: the column 'dose' has no value there" in notes
    assert "no value at this site, so each row counts as missing one: 'dose'" in notes
    lines = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    assert lines[-1]["sites"] == 3


def test_a_resumed_coordinator_compares_with_what_is_saved(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    first = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in "ab"}
    run(experiment(rounds=1), first, tmp_path / "runs")
    saved = read_federation(tmp_path / "runs" / "coordinator")
    assert saved is not None and len(saved["agreed"]) >= 4
    change(tmp_path / "data" / "late", lambda row: row | {"sex": str(int(row["sex"] == "m"))})
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=2) for s in SIZES}
    outcome = run(
        experiment(rounds=2),
        sites,
        tmp_path / "runs",
        rules=RoundRules(2, 60.0),
        done=1,
        may_be_refused=["late"],
    )
    assert "the column 'sex' is 'number:mean' at this site" in outcome.refused["late"]


def test_a_run_of_an_earlier_version_says_that_it_does_not_compare(
    tmp_path: Path, notes: list[str]
) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    told = "the run began with an earlier version of fedpax: the columns of sites that join late"
    for rounds, names in ((1, "ab"), (2, SIZES)):
        sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=rounds) for s in names}
        assert not [note for note in notes if told in note]
        run(experiment(rounds=rounds), sites, tmp_path / "runs", done=rounds - 1)
        saved = read_federation(folder := tmp_path / "runs" / "coordinator")
        assert saved is not None and bool(saved["agreed"]) == (rounds == 1)
        exchange = _open_exchange(
            experiment(rounds=rounds),
            folder,
            RoundRules(2, 60.0),
            SiteTable(60.0),
            {name: value for name, value in saved.items() if name != "agreed"},
            None,
            1.0,
        )
        assert exchange.agreed is None
        write_federation(folder, exchange, exchange.inputs)
    assert len([note for note in notes if told in note]) == 1


@pytest.mark.parametrize("had_round", [False, True])
def test_only_a_site_without_rounds_leaves_the_population(had_round: bool) -> None:
    identity = Identity("v", {}, {})
    exchange = TaskExchange(identity, SiteTable(60.0), rounds=1, run="run")

    def call(name: str, kind: str, **fields: Any) -> Message:
        return exchange.handle(
            "", Message({"kind": kind, "site": name, "incarnation": "i", **fields}, {})
        )

    for name in "ab":
        call(name, "join", identity=identity._asdict(), description={"clients": 2})
    site = exchange.sites.get("b")
    assert site is not None
    site.rounds = int(had_round)
    exchange.find_misfit = lambda name, description: "other columns" if name == "b" else None
    exchange.inputs = {}  # agreed on without "b"
    assert call("a", "work", inputs=False).header["status"] == "inputs"
    with pytest.raises(RefusedError, match="refuses site 'b': other columns"):
        call("b", "work", inputs=False)
    assert (exchange.sites.get("b") is site) == had_round
    assert exchange.sites.num_clients == (4 if had_round else 2)
    for name in "ca":  # other clients keep their numbers
        call(name, "join", identity=identity._asdict(), description={"clients": 1 + (name == "a")})
    firsts = {each.name: each.first for each in exchange.sites}
    assert firsts == ({"a": 0, "b": 2, "c": 4} if had_round else {"a": 0, "c": 2})


def test_no_number_of_values_is_told(tmp_path: Path) -> None:
    write_hospitals(tmp_path, SIZES)
    change(tmp_path / "a", lambda row: row | {"outcome": row["age"]})
    description = experiment(f"{tmp_path}/a/*.csv").describe_site()
    assert description["label"]["reason"] == "numbers"
    assert not any(c.isdigit() for column in description["columns"] for c in column["reason"])


def test_the_coordinators_model_is_exported_without_data_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hospitals(tmp_path / "data", {"a": (40, 25), "b": (33,)})
    monkeypatch.chdir(tmp_path / "data" / "a")  # the current folder has data
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in "ab"}
    run(experiment(rounds=1), sites, tmp_path / "runs")
    agreed = read_federation(tmp_path / "runs" / "coordinator")
    assert agreed is not None
    coordinator = experiment(rounds=1).with_inputs(agreed["inputs"])
    coordinator.write_configuration(tmp_path / "runs" / "coordinator", "fedavg_table")
    write_configuration(tmp_path / "runs" / "a", sites["a"], "fedavg_table")
    for name in ("coordinator", "a"):
        where = f"--job_log_dir={tmp_path}/runs/{name}"
        assert main(["export", where, "--format=npz", f"--out={tmp_path}/{name}"]) == 0
        assert str(tmp_path) not in (tmp_path / name / "config.json").read_text()
        exp, read = read_configuration(tmp_path / name) or ("", None)
        assert exp == "fedavg_table" and read == experiment(rounds=1)
        assert json.loads((tmp_path / name / "table.json").read_text()) == agreed["inputs"]
    ours, theirs = (np.load(tmp_path / name / "params.npz") for name in ("coordinator", "a"))
    assert sorted(ours.files) == sorted(theirs.files)
    for name in ours.files:
        np.testing.assert_array_equal(ours[name], theirs[name])
