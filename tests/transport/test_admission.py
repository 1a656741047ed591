"""Admission: which messages of a site are handled, muted or refused, and for how long."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.errors import ConfigurationError
from fedpax.transport.admission import (
    EXPELLED_FILE,
    Admission,
    SiteLimits,
    admit,
    expel,
    read_expulsions,
)
from fedpax.transport.calls import (
    BusyError,
    DisconnectedError,
    MalformedError,
    RefusedError,
    connect,
    serve,
)
from fedpax.transport.certificates import make_certificates
from fedpax.transport.message import Message

HELLO = Message({})


class Guarded:
    """A guarded handler with a clock of its own."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.now, self.handled = 1000.0, []
        self.admission = Admission(folder, SiteLimits(**limits), clock=lambda: self.now)
        self.handler = self.admission.guard(self.handle)
        self.action: Callable[[], None] = lambda: None

    def handle(self, peer: str, message: Message) -> Message:
        self.handled.append(peer)
        self.action()
        return Message({"peer": peer})

    def malformed(self) -> None:
        raise MalformedError("field 'steps' is\n-1")

    def send(self, peer: str, message: Message = HELLO, seconds: float = 0.0) -> str:
        self.now += seconds
        try:
            self.handler(peer, message)
        except (RefusedError, BusyError) as error:
            return f"{type(error).__name__}: {error}"
        return "ok"


def test_a_site_is_expelled_while_it_is_connected(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)
    assert guarded.send("a") == guarded.send("b") == "ok"
    expel(tmp_path, "a", "it left")
    words = guarded.send("a", seconds=0.6)
    assert words.startswith("RefusedError: site 'a' is expelled from this run (it left). Ask the")
    assert guarded.send("b") == "ok" and guarded.handled == ["a", "b", "b"]
    assert "it left" in Guarded(tmp_path).send("a")  # a restarted coordinator
    admit(tmp_path, "a")
    assert guarded.send("a", seconds=0.6) == "ok"


def test_a_long_call_of_an_expelled_site_gets_no_answer(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)

    def wait() -> None:
        expel(tmp_path, "a", "it left")
        guarded.now += 0.6

    guarded.action = wait
    assert guarded.send("a").startswith("RefusedError")
    assert guarded.handled == ["a"]


def test_without_certificates_a_stranger_expels_no_site(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)
    claimed = Message({"island": "a"})
    guarded.action = guarded.malformed
    for _ in range(20):
        assert guarded.send("", claimed).startswith("MalformedError: field 'steps'")
    guarded.action = lambda: None
    assert guarded.send("", claimed) == "ok" and not read_expulsions(tmp_path)


def test_without_certificates_a_site_is_what_it_claims(tmp_path: Path) -> None:
    expel(tmp_path, "a", "it left")
    guarded = Guarded(tmp_path)
    assert guarded.send("", Message({"island": "a"})).startswith("RefusedError")
    assert guarded.send("", Message({"site": "a"})).startswith("RefusedError")
    for header in ({"island": "b"}, {}, {"island": 3}, {"island": "b" * 300}, {"island": ["a"]}):
        assert guarded.send("", Message(header)) == "ok"
    # A claim does not hide the name of the certificate.
    assert guarded.send("a", Message({"island": "b"})).startswith("RefusedError")
    assert guarded.send("b", Message({"island": "a"})) == "ok"


def test_a_file_that_is_damaged_later_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expel(tmp_path, "a", "it left")
    guarded = Guarded(tmp_path)
    (tmp_path / EXPELLED_FILE).write_text("{")
    with caplog.at_level(logging.WARNING):
        assert guarded.send("a", seconds=0.6).startswith("RefusedError")
    assert "expelled sites stay as they were" in caplog.text
    with pytest.raises(ConfigurationError, match="damaged"):
        Guarded(tmp_path)


def test_messages_beyond_the_limit_mute_until_they_are_paid_off(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, messages_per_minute=10)
    assert [guarded.send("a") for _ in range(11)] == ["ok"] * 11  # a minute's worth, and one
    assert guarded.send("a").startswith(
        "BusyError: site 'a' is muted for 6 s: it has sent more than 10 messages a minute. Wait"
    )
    assert guarded.send("b") == "ok"
    assert guarded.send("a", seconds=6.1) == "ok"
    assert guarded.send("a").startswith("BusyError")
    # At the stated rate no message is refused.
    assert {guarded.send("c", seconds=6.0) for _ in range(100)} == {"ok"}


def test_bytes_beyond_the_limit_mute(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, bytes_per_minute=1000)
    large = Message({}, {"x": np.zeros(750, np.float32)})  # three minutes' worth
    assert guarded.send("a", large) == "ok"
    assert "muted for 120 s: it has sent more than 1000 bytes a minute" in guarded.send("a")
    assert guarded.send("a", seconds=119).startswith("BusyError")
    assert guarded.send("a", large, seconds=2) == "ok"
    assert len(guarded.handled) == 2


def test_malformed_messages_mute_and_then_expel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = Guarded(tmp_path, mute_after=2, mute_seconds=60, expel_after=4)
    guarded.action = guarded.malformed
    assert all(guarded.send("a").startswith("MalformedError") for _ in range(3))
    assert "muted for 60 s: it has sent 3 malformed messages in the" in guarded.send("a")
    assert guarded.send("a", seconds=61).startswith("MalformedError")
    assert read_expulsions(tmp_path) == {}
    assert guarded.send("a", seconds=61).startswith("MalformedError")
    expulsion = read_expulsions(tmp_path)["a"]
    assert (expulsion.by, expulsion.reason) == (
        "rule",
        "5 malformed messages in an hour, the last one: field 'steps' is?-1",
    )
    assert "site 'a' is expelled" in caplog.text
    guarded.action = lambda: None
    assert guarded.send("a").startswith("RefusedError") and guarded.send("b") == "ok"
    assert Guarded(tmp_path).send("a").startswith("RefusedError")


def test_malformed_messages_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, mute_after=2, expel_after=4)
    guarded.action = guarded.malformed
    answers = {guarded.send("a", seconds=1801) for _ in range(20)}
    assert len(answers) == 1 and read_expulsions(tmp_path) == {}


def test_other_refusals_do_not_count(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, mute_after=0, expel_after=0)

    def refuse() -> None:
        raise RefusedError("no shard is free")

    guarded.action = refuse
    assert {guarded.send("a") for _ in range(20)} == {"RefusedError: no shard is free"}
    assert read_expulsions(tmp_path) == {}


def test_invented_names_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpax.transport.admission._MOST_SITES", 8)
    guarded = Guarded(tmp_path, messages_per_minute=1)
    for i in range(100):
        guarded.send("", Message({"site": f"s{i}"}))
    assert len(guarded.admission._sites) == 8


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("admission") / "certificates"
    make_certificates(folder, ["localhost", "site-1", "site-2"])
    return folder


def test_over_the_wire(tmp_path: Path, certificates: Path) -> None:
    guarded = Guarded(tmp_path, mute_after=1, mute_seconds=60, expel_after=3)
    large = Message({}, {"x": np.zeros(5000, np.float32)})
    with (
        serve(
            guarded.handle,
            "localhost:0",
            certificates=certificates / "localhost",
            admission=guarded.admission,
            max_message_bytes=1000,
        ) as server,
        connect(f"localhost:{server.port}", certificates=certificates / "site-1") as connection,
        connect(f"localhost:{server.port}", certificates=certificates / "site-2") as two,
    ):
        assert connection.call(HELLO, 10).header == {"peer": "site-1"}
        for _ in range(2):  # they are refused before they reach the handler, and count
            with pytest.raises(RefusedError, match="expected at most max_message_bytes"):
                connection.call(large, 10)
        with pytest.raises(DisconnectedError, match=r"site 'site-1' is muted for 60 s: .* Wait"):
            connection.call(HELLO, 10)
        assert two.call(HELLO, 10).header == {"peer": "site-2"}
        expel(tmp_path, "site-1", "it left")
        guarded.now += 0.6
        with pytest.raises(RefusedError, match=r"is expelled from this run \(it left\)"):
            connection.call(large, 10)  # its size is not looked at any more
        assert two.call(HELLO, 10).header == {"peer": "site-2"}
    assert os.listdir(tmp_path) and guarded.handled == ["site-1", "site-2", "site-2"]
