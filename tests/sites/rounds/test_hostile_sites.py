"""Sites and coordinators that send what they should not, and sites that miss the end."""

from pathlib import Path
from typing import Any

import pytest
from sites.rounds.federation import Line, run, write_hospitals
from sites.rounds.small_experiment import small
from sites.rounds.test_equals_training import experiment

from fedpax.checkpoints.saved_rounds import complete_rounds
from fedpax.errors import ConfigurationError
from fedpax.sites.rounds.exchange import Exchange, check_types, checked_fields
from fedpax.sites.rounds.round_rules import RoundRules
from fedpax.sites.rounds.site_table import read_sites
from fedpax.sites.rounds.site_worker import SiteWorker
from fedpax.sites.transport.calls import MalformedError, RefusedError
from fedpax.sites.transport.message import Message


@pytest.mark.parametrize(
    "fields",
    [
        {"examples": "abc"},
        {"examples": -1},
        {"examples": 10**400},
        {"metrics": {"loss": 10**400}},
        {"metrics": {"loss": "low"}},
        {"metrics": {"a\x1b[2J": 1.0}},
        {"metrics": {f"m{i}": 1.0 for i in range(101)}},
        {"metrics": 3},
    ],
)
def test_fields_of_a_reply_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        checked_fields(fields)


@pytest.mark.parametrize(
    "kind", [3, ["float32"], ["float32", [1 << 40]], ["float32", ["a"]], ["nothing", [1]], None]
)
def test_types_of_a_batch_are_checked(kind: Any) -> None:
    check_types({"x": ["float32", [4, 3]]})
    with pytest.raises(MalformedError):
        check_types({"x": kind})


@pytest.mark.parametrize("clients", [[2], [0, 0], [-1], [0.0], ["0"], [], None])
def test_a_site_answers_for_its_own_clients_alone(tmp_path: Path, clients: Any) -> None:
    worker = SiteWorker(
        small(clients=2), tmp_path, seed=0, save=lambda *_: None, on_metrics=lambda *_: None
    )
    slots = [0] * len(clients or ())
    header = {"first_client": 0, "num_clients": 2, "clients": clients, "slots": slots}
    with pytest.raises(RefusedError):
        worker.work({**header, "task": "round", "token": "t", "stage": 0}, {})


class Changed(Line):
    """A line that changes what a site sends."""

    def __init__(self, exchange: Exchange, change: Any) -> None:
        super().__init__(exchange)
        self._change = change

    def call(self, message: Message, timeout: float) -> Message:
        header = self._change(dict(message.header))
        return super().call(message._replace(header=header), timeout)


def test_a_site_without_a_loss_is_no_part_of_the_mean(tmp_path: Path) -> None:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        if "metrics" in header.get("fields", {}):
            header["fields"] = {"metrics": {"loss": None}, "examples": 8}
        return header

    sites = {"a": small(rounds=2), "b": small(rounds=2, data_seed=1)}
    lines = {"b": lambda exchange: Changed(exchange, change)}
    found = run(small(rounds=2), sites, tmp_path, lines=lines)
    rows = {site.name: site for site in read_sites(found.folder / "coordinator")}
    assert "loss" in rows["a"].heldout and rows["b"].heldout == {}


def test_a_site_without_a_sampled_client_has_the_model_too(tmp_path: Path) -> None:
    fields = {"cohort_size": 1, "rounds": 2}
    sites = {name: small(**fields, data_seed=seed) for seed, name in enumerate("abc")}
    found = run(small(**fields), sites, tmp_path)
    rows = {site.name: site.rounds for site in read_sites(found.folder / "coordinator")}
    assert sum(rows.values()) == 2
    for name in sites:
        assert complete_rounds(tmp_path / name / "checkpoints") == [2]


def test_a_finished_coordinator_gives_sites_the_model(tmp_path: Path) -> None:
    sites = {"a": small(rounds=2), "b": small(rounds=2, data_seed=1)}
    run(small(rounds=2), sites, tmp_path)
    for path in (tmp_path / "b").iterdir():
        if path.name == "checkpoints":
            path.rename(tmp_path / "lost")
    run(small(rounds=2), sites, tmp_path, done=2)
    assert complete_rounds(tmp_path / "b" / "checkpoints") == [2]


def test_a_question_tells_no_single_value(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", {"a": (40, 25)})
    site = experiment(f"{tmp_path}/data/a/*.csv")
    worker = SiteWorker(
        site, tmp_path / "w", seed=0, save=lambda *_: None, on_metrics=lambda *_: None
    )
    column = {"name": "age", "kind": "number", "missing": "mean", "values": None}
    column |= {"bounds": None, "reason": "number"}
    scaling = {"center": [50.0], "half": [1.0], "low": None, "high": None, "factor": 1.0}
    header = {"task": "question", "stage": 0, "first_client": 0, "num_clients": 2}
    header |= {"slots": [0, 1], "clients": [0, 1]}

    def ask(token: str, column: dict, scaling: dict, **changes: Any) -> Any:
        settings = {"columns": [column], "scaling": scaling}
        return worker.work({**header, "token": token, "settings": settings, **changes}, {})

    ask("t", column, scaling)
    bounded = {**scaling, "low": [78.0], "high": [79.0]}
    with pytest.raises(ValueError, match="expected the range that this site states"):
        ask("u", column, bounded)
    with pytest.raises(ValueError, match="as date, but it is number"):
        ask("v", {**column, "kind": "date"}, scaling)
    with pytest.raises(RefusedError, match="some of this site's clients"):
        ask("w", column, scaling, clients=[0], slots=[0])
    for number in range(17):
        ask(f"x{number}", column, scaling)
    with pytest.raises(RefusedError, match="more than 20 questions"):
        ask("y", column, scaling)


def test_rounds_of_several_stages_have_no_guard(tmp_path: Path) -> None:
    sites = {name: small("krum", clients=2, data_seed=seed) for seed, name in enumerate("abc")}
    with pytest.raises(ConfigurationError, match="expected a round of one stage"):
        run(small("krum"), sites, tmp_path, rules=RoundRules(3, 60.0, norm_factor=3.0))
