"""The coordinator's memory is flat in the number of sites, and large replies come few at a time."""

import threading
import tracemalloc
from pathlib import Path

import numpy as np

from fedpax.sites.downlink import whole
from fedpax.sites.site_process import Identity
from fedpax.sites.site_table import SiteTable
from fedpax.sites.task_exchange import LARGE, MOST_UPLOADS, SMALL_MESSAGE, TaskExchange
from fedpax.sites.tasks import Task, largest_message
from fedpax.transport.message import Message

SIZE = LARGE  # bytes are four times as many


def open_exchange(folder: Path, names: list[str]) -> TaskExchange:
    exchange = TaskExchange(
        Identity("v", {}, {}), SiteTable(60.0), rounds=1, run="run", folder=folder / "replies"
    )
    for name in names:
        identity = Identity("v", {}, {})._asdict()
        call(exchange, name, "join", identity=identity, description={"clients": 1})
    exchange.inputs = {}
    for name in names:
        call(exchange, name, "ready", types={})
    return exchange


def call(exchange: TaskExchange, name: str, kind: str, arrays=None, **fields) -> Message:
    header = {"kind": kind, "site": name, "incarnation": "i", **fields}
    return exchange.handle("", Message(header, arrays or {}))


def ask(exchange: TaskExchange, names: list[str], size: int) -> tuple[threading.Thread, list]:
    """Ask for one array of each site, in a thread that keeps the replies."""
    expected = {"term 0": ((size,), np.dtype(np.float32))}
    own = {name: ({"clients": [0]}, {}) for name in names}
    task = Task("token", {"task": "round", "stage": 0}, whole({}), own, expected)
    collected: list = []
    thread = threading.Thread(
        target=lambda: collected.append(exchange.ask(task, len(names), 60.0, lambda: False))
    )
    thread.start()
    while exchange._task is None:
        pass
    return thread, collected


def test_memory_is_flat_in_the_number_of_sites(tmp_path: Path) -> None:
    peaks = {}
    for count in (4, 64):
        names = [f"s{i:02}" for i in range(count)]
        exchange = open_exchange(tmp_path / str(count), names)
        (tmp_path / str(count)).mkdir(exist_ok=True)
        thread, result = ask(exchange, names, SIZE)
        random = np.random.default_rng(0)
        tracemalloc.start()
        total = np.zeros(SIZE, np.float32)
        for name in names:
            x = random.random(SIZE, np.float32)
            total += x
            answer = call(exchange, name, "reply", {"term 0": x}, token="token", stage=0, fields={})
            assert answer.header["status"] == "ok"
        thread.join()
        summed = sum(reply.arrays["term 0"] for reply in result[0].values())
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_array_equal(summed, total)
    assert peaks[64] < 1.3 * peaks[4]


def test_a_damaged_reply_on_the_disk_is_told(tmp_path: Path) -> None:
    exchange = open_exchange(tmp_path, ["a"])
    thread, result = ask(exchange, ["a"], SIZE)
    call(
        exchange,
        "a",
        "reply",
        {"term 0": np.ones(SIZE, np.float32)},
        token="token",
        stage=0,
        fields={},
    )
    thread.join()
    (path,) = (tmp_path / "replies").glob("*.reply")
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    with np.testing.assert_raises(ValueError):
        _ = result[0]["a"].arrays


def test_large_replies_are_received_few_at_a_time(tmp_path: Path) -> None:
    names = [f"s{i}" for i in range(MOST_UPLOADS + 2)]
    exchange = open_exchange(tmp_path, names)
    thread, _ = ask(exchange, names, SIZE)
    offers = [call(exchange, name, "offer").header["status"] for name in names]
    assert offers == ["send"] * MOST_UPLOADS + ["later"] * 2
    assert call(exchange, names[0], "offer").header["status"] == "send", "asks again"
    x = np.ones(SIZE, np.float32)
    call(exchange, names[0], "reply", {"term 0": x}, token="token", stage=0, fields={})
    assert call(exchange, names[-1], "offer").header["status"] == "send"
    assert call(exchange, names[-2], "offer").header["status"] == "later"
    for name in names[1:]:
        call(exchange, name, "reply", {"term 0": x}, token="token", stage=0, fields={})
    thread.join()


def test_the_largest_message_follows_the_model(tmp_path: Path) -> None:
    exchange = open_exchange(tmp_path, ["a"])
    assert exchange.max_message_bytes == SMALL_MESSAGE
    thread, _ = ask(exchange, ["a"], 3 * SIZE)
    assert exchange.max_message_bytes == 3 * 4 * SIZE
    x = np.ones(3 * SIZE, np.float32)
    call(exchange, "a", "reply", {"term 0": x}, token="token", stage=0, fields={})
    thread.join()
    thread, _ = ask(exchange, ["a"], 1)
    assert exchange.max_message_bytes == 3 * 4 * SIZE  # a late reply still fits
    call(exchange, "a", "reply", {"term 0": x[:1]}, token="token", stage=0, fields={})
    thread.join()
    packet, rows = whole({"shared 0": np.zeros(5, np.float32)}), np.zeros((2, 7), np.float64)
    own = {"a": ({"clients": [0, 1]}, {"row 0": rows})}
    expected = {"shown 0": ((None, 9), np.dtype(np.float32))}
    task = Task("t", {}, packet, own, expected)
    assert largest_message(task) == max(5 * 4 + 2 * 7 * 8, 2 * 9 * 4)
