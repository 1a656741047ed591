"""A site with a certificate cannot fill the memory of a server: it has few calls at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from fedpax.transport.calls import DisconnectedError, connect, serve
from fedpax.transport.certificates import make_certificates
from fedpax.transport.message import Message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    where = tmp_path_factory.mktemp("certificates") / "all"
    make_certificates(where, ["localhost", "a", "b"])
    yield where


def test_a_site_has_few_calls_at_a_time(folder: Path) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()

    def answer(peer: str, message: Message) -> Message:
        if message.header["kind"] == "wait":
            arrived.release()
            go.wait(30)
        return Message({"peer": peer})

    with (
        serve(
            answer, "localhost:0", certificates=folder / "localhost", max_calls_per_site=2
        ) as server,
        connect(f"localhost:{server.port}", certificates=folder / "a") as a,
        connect(f"localhost:{server.port}", certificates=folder / "b") as b,
    ):
        calls = [
            threading.Thread(target=a.call, args=(Message({"kind": "wait"}), 60.0))
            for _ in range(2)
        ]
        for call in calls:
            call.start()
        for _ in calls:
            assert arrived.acquire(timeout=30)
        with pytest.raises(DisconnectedError, match="site 'a' has more than 2 calls at a time"):
            a.call(Message({"kind": "now"}), 30.0)
        assert b.call(Message({"kind": "now"}), 30.0).header == {"peer": "b"}
        go.set()
        for call in calls:
            call.join()
        assert a.call(Message({"kind": "now"}), 30.0).header == {"peer": "a"}
