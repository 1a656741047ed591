"""Sites and coordinators that send what they should not, and sites that miss the end."""

import dataclasses
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.errors import ArgumentError, ConfigurationError
from fedpax.experiments.fedavg_text import fedavg_lora_text
from fedpax.run_files.paths import complete_rounds
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.run_coordinator import run_coordinator
from fedpax.sites.site_process import identify
from fedpax.sites.site_table import SiteTable, read_sites
from fedpax.sites.site_worker import SiteWorker
from fedpax.sites.take_part import take_part
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import check_types, checked_fields, read_message, write_message
from fedpax.transport.calls import MalformedError, RefusedError
from fedpax.transport.message import Message, MessageError, decode, encode
from sites.federation import Changed, Line, run, write_hospitals
from sites.small_experiment import small, train_together
from sites.test_equals_training import experiment


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


def test_a_site_without_a_loss_is_no_part_of_the_mean(tmp_path: Path) -> None:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        if "metrics" in header.get("fields", {}):
            header["fields"] = {"metrics": {"loss": None}, "examples": 8}
        return header

    sites = {"a": small(rounds=2), "b": small(rounds=2, data_seed=1)}
    lines = {"b": lambda exchange: Changed(exchange, change)}
    outcome = run(small(rounds=2), sites, tmp_path, lines=lines)
    rows = {site.name: site for site in read_sites(outcome.folder / "coordinator")}
    assert "loss" in rows["a"].heldout and rows["b"].heldout == {}


def test_a_site_without_a_sampled_client_has_the_model_too(tmp_path: Path) -> None:
    fields = {"cohort_size": 1, "rounds": 2}
    sites = {name: small(**fields, data_seed=seed) for seed, name in enumerate("abc")}
    outcome = run(small(**fields), sites, tmp_path)
    rows = {site.name: site.rounds for site in read_sites(outcome.folder / "coordinator")}
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
    others = [{**scaling, "center": [float(number)]} for number in range(18)]
    for token in ("x", "y"):  # a site left, and all questions are repeated
        answers = [ask(f"{token}{n}", column, other) for n, other in enumerate(others[:17])]
    with pytest.raises(RefusedError, match=r"20 different questions .* start this site again"):
        ask("z", column, others[17])
    np.testing.assert_equal(answers[0][1], ask("x0", column, others[0])[1])


def test_rounds_of_several_stages_have_no_guard(tmp_path: Path) -> None:
    sites = {name: small("krum", clients=2, data_seed=seed) for seed, name in enumerate("abc")}
    with pytest.raises(ConfigurationError, match="expected a round of one stage"):
        run(small("krum"), sites, tmp_path, rules=RoundRules(3, 60.0, norm_factor=3.0))


def test_the_numbers_of_clients_of_a_site_are_bounded(tmp_path: Path) -> None:
    config = small(clients=2)
    identity = identify(config, {}, config.shared_content())
    exchange = TaskExchange(identity, SiteTable(30.0), rounds=1, run="r")

    def join(name: str, clients: int) -> Message:
        header = {"kind": "join", "site": name, "incarnation": name, "identity": identity._asdict()}
        return exchange.handle("", Message({**header, "description": {"clients": clients}}))

    for k in range(5):  # as a site whose files change
        assert join("south", 9_000 + k).header["status"] == "ok"
    join("north", 3)
    with pytest.raises(RefusedError, match="joined 100 times with another number of clients"):
        for k in range(200):
            join("south", 1 + k % 2)
    with pytest.raises(RefusedError, match="1,099,511,627,776 clients, expected at most 10,000"):
        join("west", 1 << 40)
    assert exchange.sites.num_clients < 2_000_000
    assert join("north", 4).header["status"] == "ok"


def test_local_steps_of_all_sites_are_bounded() -> None:
    text = fedavg_lora_text()
    text = dataclasses.replace(text, cohort=dataclasses.replace(text.cohort, max_steps=None))
    with pytest.raises(ArgumentError, match="1,099,511,627,776 local steps"):
        text.shared_properties({"clients": 1, "max_steps": 1 << 40})


def test_a_link_in_place_of_the_states_of_clients_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "notes.new").write_text("a file of the user")
    for name in ("kept", "replies"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to(theirs)
        with pytest.raises(ConfigurationError, match="is a link to"):
            take_part(small(), folder, "127.0.0.1:1", give_up_after=0.0)
        with pytest.raises(ConfigurationError, match="is a link to"):
            run_coordinator(small(), folder, "127.0.0.1:0")
    assert (theirs / "notes.new").read_text() == "a file of the user"


def test_the_sizes_in_a_file_of_states_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    write_message(path, Message({"token": "t"}, {"x": np.arange(7.0)}))
    content = path.read_bytes()
    first = content[8 : 4 + int.from_bytes(content[:4], "little")]
    body = first.replace(b"[7]", b"[%d]" % (1 << 40))
    assert body != first
    chunk = zlib.crc32(body).to_bytes(4, "little") + body
    path.write_bytes(len(chunk).to_bytes(4, "little") + chunk)
    with pytest.raises(MessageError, match="expected at most max_message_bytes"):
        read_message(path)


def test_a_header_that_nests_deep_is_refused() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    chunks = encode(Message({"kind": "join", "description": deep}), 100)
    with pytest.raises(MessageError, match="deeper than 100 levels"):
        decode(chunks, 100)


class Replays(Line):
    """A line that sends each reply twice, and once more after the next one."""

    def call(self, message: Message, timeout: float) -> Message:
        answer = super().call(message, timeout)
        if message.header["kind"] == "reply":
            earlier, self.last = getattr(self, "last", message), message
            for again in (message, earlier):
                answers = super().call(again, timeout)
                assert answers.header["status"] in ("repeated", "late")
        return answer


class Holds(Line):
    """A line that loses each reply, and nothing else."""

    def call(self, message: Message, timeout: float) -> Message:
        if message.header["kind"] == "reply" and "examples" in message.header["fields"]:
            time.sleep(0.3)
            return Message({"status": "late"})
        return super().call(message, timeout)


@pytest.mark.parametrize("line", [Replays, pytest.param(Holds, marks=pytest.mark.slow)])
def test_replies_that_are_repeated_or_never_come(tmp_path: Path, line: type[Line]) -> None:
    sites = {name: small(rounds=3, data_seed=seed) for seed, name in enumerate("abc")}
    rules = RoundRules(2, 1.5 if line is Holds else 60.0)
    outcome = run(
        small(rounds=3), sites, tmp_path, rules=rules, first_round_needs=3, lines={"c": line}
    )
    names = ["a", "b"] if line is Holds else list(sites)
    wanted = train_together(sites, 3, lambda _: names).params
    for leaf, other in zip(outcome.params, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
