"""The end of rounds over sites: sites that were down then, and sites that have the last model."""

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedpax.commands.join import describe_site
from fedpax.errors import ConfigurationError
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.run_coordinator import run_coordinator
from fedpax.sites.site_files import read_run
from fedpax.sites.site_process import Identity
from fedpax.sites.site_table import SiteTable
from fedpax.sites.take_part import Site, take_part
from fedpax.sites.task_exchange import TaskExchange
from fedpax.training.progress import Progress
from fedpax.transport.calls import DisconnectedError
from fedpax.transport.message import Message
from sites.federation import Line, opened, run
from sites.small_experiment import small

SITES = {name: small(rounds=2, data_seed=seed) for seed, name in enumerate("ab")}


def has_last_model(folder: Path) -> bool:
    return json.loads((folder / "site.json").read_text())["finished"]


def test_a_site_with_the_last_model_ends_without_a_coordinator(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    run(small(rounds=2), SITES, tmp_path)
    assert has_last_model(tmp_path / "a")
    result = take_part(SITES["a"], tmp_path / "a", "127.0.0.1:1", give_up_after=0.3)
    assert result == (2, True, None, True)  # the rounds of its earlier process
    words = describe_site(result, "runs/a", "127.0.0.1:1", has_model=True)
    assert words.startswith("Finished before: the model is saved in runs/a. No syncer answers")
    result = take_part(SITES["a"], tmp_path / "new", "127.0.0.1:1", give_up_after=0.3)
    assert result == (0, False, None, True)
    words = describe_site(result, "runs/new", "127.0.0.1:1", has_model=False)
    assert "Start the syncer" in words and "for --goodbye_seconds when it is started" in words


@pytest.mark.parametrize(
    ("name", "value"), [("stop_on_non_finite", False), ("keep_every", 2), ("on_spike", "skip")]
)
def test_a_setting_of_the_training_that_rounds_do_not_read_is_told(
    name: str, value: object, tmp_path: Path
) -> None:
    training = dataclasses.replace(SITES["a"].training, **{name: value})
    experiment = dataclasses.replace(SITES["a"], training=training)
    expected = rf"training\.{name}={value!r} has no effect on rounds over sites"
    with pytest.raises(ConfigurationError, match=expected):
        take_part(experiment, tmp_path / "a", "127.0.0.1:1", give_up_after=0.3)
    with pytest.raises(ConfigurationError, match=expected):
        run_coordinator(experiment, tmp_path / "coordinator", "127.0.0.1:0")


def test_a_site_whose_coordinator_ends_before_it_hears_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpax.sites.take_part.SECONDS_TO_ASK_AGAIN", 0.2)

    class Deaf(Line):
        """A line that ends with the answer to the last evaluation."""

        ended = False

        def call(self, message: Message, timeout: float) -> Message:
            if self.ended and message.header["kind"] != "leave":
                raise DisconnectedError("memory: no coordinator")
            fields = message.header.get("fields", {})
            self.ended |= "metrics" in fields and self._exchange.round == 2
            return super().call(message, timeout)

    began = time.monotonic()
    outcome = run(small(rounds=2), SITES, tmp_path, lines={"a": Deaf})
    line = outcome.lines["a"]
    assert isinstance(line, Deaf) and line.ended and has_last_model(tmp_path / "a")
    assert time.monotonic() - began < 60


def test_more_rounds_make_the_model_an_earlier_one(tmp_path: Path) -> None:
    run(small(rounds=2), SITES, tmp_path)
    seen = []

    class Watching(Line):
        def call(self, message: Message, timeout: float) -> Message:
            if message.header["kind"] == "reply":
                seen.append(has_last_model(tmp_path / "a"))
            return super().call(message, timeout)

    longer = {name: small(rounds=3, data_seed=seed) for seed, name in enumerate("ab")}
    run(small(rounds=3), longer, tmp_path, done=2, lines={"a": Watching})
    assert seen == [False, True] and has_last_model(tmp_path / "a")


def test_a_site_that_waits_for_more_rounds_waits_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished site asks for 15 s, but not once a coordinator with more rounds has answered."""
    monkeypatch.setattr("fedpax.sites.take_part.SECONDS_TO_ASK_AGAIN", 0.0)
    run(small(rounds=2), SITES, tmp_path)
    answers = [
        {"status": "ok", "run": read_run(tmp_path / "a").run, "heartbeat_seconds": 60.0},
        {"status": "wait", "waits_for": "b"},
    ]
    answers[0] |= {"down": "float32", "rounds": 3}
    heard = [0.0]

    class Ending:
        address, max_message_bytes = "memory", 0

        def call(self, message: Message, timeout: float) -> Message:
            if message.header["kind"] not in ("join", "work") or not answers:
                raise DisconnectedError("memory: no coordinator")
            heard[0] = time.monotonic()
            return Message(answers.pop(0))

    with Progress("x", rounds_done=0, rounds=3) as progress:
        site = Site(
            small(rounds=3),
            tmp_path / "a",
            Ending(),  # type: ignore[arg-type]
            progress,
            name="a",
            exp="e",
            stop=lambda: False,
            give_up_after=1.5,
        )
        site.run()
    assert not answers and site.gave_up and time.monotonic() - heard[0] >= 1.5


def open_goodbye(folder: Path, expelled: str = "") -> Any:
    """Return the coordinator of a finished run of the sites a and b."""
    run(small(rounds=2), SITES, folder)
    table = SiteTable(60.0, lambda name: name in expelled)
    for name in "ab":
        table.add(name, 1)
    exchange = TaskExchange(Identity("v", {}, {}), table, rounds=2, run="run")
    exchange.inputs = {}
    return opened(small(rounds=2), folder / "coordinator", exchange, RoundRules(), 2)


@pytest.mark.parametrize("expelled", ["", "b", "ab"])
def test_the_coordinator_names_sites_that_were_down_at_the_end(
    tmp_path: Path, notes: list[str], expelled: str
) -> None:
    with open_goodbye(tmp_path, expelled) as coordinator:
        began = time.monotonic()
        coordinator.run()
        coordinator.say_goodbye(0.5)
    told = [note for note in notes if "have not asked for the last model" in note]
    assert len(told) == (expelled != "ab")
    assert (time.monotonic() - began >= 0.5) == (expelled != "ab")  # expelled sites do not come
    if told:
        names = ", ".join(sorted({"a", "b"} - set(expelled)))
        assert f"model: {names}. If they lack it, run the same command again" in told[0]


def test_a_site_that_is_there_when_the_goodbye_ends_gets_the_model(
    tmp_path: Path, notes: list[str]
) -> None:
    with open_goodbye(tmp_path) as coordinator:
        coordinator.run()
        exchange = coordinator.exchange

        def call(kind: str, **fields: Any) -> Any:
            header = {"kind": kind, "site": "b", "incarnation": "i", **fields}
            return exchange.handle("", Message(header, {})).header

        identity = Identity("v", {}, {})._asdict()
        assert call("join", identity=identity, description={"clients": 1})["status"] == "ok"
        goodbye = threading.Thread(target=coordinator.say_goodbye, args=(0.2,))
        goodbye.start()
        time.sleep(1.0)  # the site reads its data
        types = {"x": ["float32", [2, 4, 3]], "y": ["float32", [2, 4]]}
        assert call("ready", types=exchange.types or types)["status"] == "ok"
        while (task := call("work", inputs=True, have=None))["status"] == "wait":
            pass
        assert task["task"] == "evaluate" and task["save"]
        time.sleep(1.0)  # and evaluates the model
        fields = {"metrics": {"loss": 0.5}, "examples": 8}
        place = {"token": task["token"], "stage": task["stage"]}
        assert call("reply", fields=fields, **place)["status"] == "ok"
        while (answer := call("work", inputs=True, have=None))["status"] == "wait":
            pass
        assert answer["status"] == "finished"
        goodbye.join(30)
        assert not goodbye.is_alive()
    (told,) = [note for note in notes if "have not asked for the last model" in note]
    assert "model: a. If they lack it" in told


def test_a_restarted_coordinator_knows_how_often_a_site_was_renumbered() -> None:
    table = SiteTable(60.0)
    for count in (1, 2, 3):
        site = table.add("a", count)
    assert site.renumbered == 2
    restored = SiteTable(60.0)
    restored.restore(json.loads(json.dumps(table.to_json())))
    again = restored.get("a")
    assert again is not None and again.renumbered == 2
