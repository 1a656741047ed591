"""The exchange of an island of several processes: all of them see the same, and do the same."""

import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedpax.islands.island.island import Island, SharedLink
from fedpax.islands.island.link import Link
from fedpax.islands.island.training_rounds import wait_for_merge
from fedpax.sites.site_process import WIRE_FORMAT
from fedpax.transport.calls import DisconnectedError, RefusedError
from fedpax.transport.message import Message

FRAGMENTS, STEPS, PHASES = 3, 2, 40
LIKE = {"w": SimpleNamespace(shape=(2,), dtype=np.dtype("float32"))}


class Channel:
    """Values of process 0, for another process that runs after it."""

    def __init__(self, first: bool, values: queue.SimpleQueue) -> None:
        self.is_first, self._values = first, values

    def broadcast(self, value: Any) -> Any:
        if not self.is_first:
            return self._values.get_nowait()  # raises if the processes do not do the same
        self._values.put(value)
        return value


class RandomSyncer:
    """A syncer that merges, drops, refuses, disconnects and loses its newest state at random."""

    def __init__(self, seed: int, refuses_after: int = 10**6, loss: float = 0.0) -> None:
        self.rng, self.merges, self.calls = np.random.default_rng(seed), 0, 0
        self.refuses_after, self.loss, self.losses, self.lost = refuses_after, loss, 0, False

    def call(self, message: Message, timeout: float) -> Message:
        self.calls += 1
        if self.calls > self.refuses_after:
            raise RefusedError("another island has this name")
        if self.rng.random() < 0.2:
            raise DisconnectedError("the line is cut")
        if message.header["kind"] != "join" and (self.lost or self.rng.random() < self.loss):
            if not self.lost:
                self.merges, self.lost, self.losses = self.merges // 2, True, self.losses + 1
            return Message({"status": "join"})
        self.merges += int(self.rng.integers(3))
        header: dict[str, Any] = {"status": "accepted", "merges": self.merges, "finished": False}
        header["saved"] = {}
        arrays: dict[str, np.ndarray] = {}
        if message.header["kind"] == "join":
            header |= {"heartbeat_seconds": 1.0, "received": {"1": ["old", 7]}, "run": "r"}
            header["wire_format"] = WIRE_FORMAT
            header |= {"shard": 2, "rounds": 9, "epoch": str(self.losses), "discard": self.lost}
            self.lost = False
        elif message.header["kind"] == "push":
            count, p = message.header["count"], message.header["fragment"]
            assert 0 <= count <= -(-max(self.merges - p, 0) // FRAGMENTS)
            sequence = message.header["sequence"]
            header["status"] = str(self.rng.choice(["accepted", "late", "stale", "too_large"]))
            header["saved"] = {str(p): sequence for p in range(FRAGMENTS)}
        else:
            done = [-(-max(self.merges - p, 0) // FRAGMENTS) for p in range(FRAGMENTS)]
            new = [p for p, version in enumerate(message.header["versions"]) if done[p] > version]
            if new:
                header |= {"fragment": new[0], "version": done[new[0]], "more": len(new) > 1}
                arrays = {"w": self.rng.normal(size=2).astype(np.float32)}
        return Message(header, arrays)


class Model:
    """The programs that a process dispatches, in order; nothing is computed."""

    formats = [SimpleNamespace(shapes=LIKE)] * FRAGMENTS

    def __init__(self) -> None:
        self.programs: list[tuple[Any, ...]] = []

    def init(self) -> None:
        self.programs.append(("init",))

    def take_steps(self, state: None, batches: None, start: int) -> tuple[None, Any]:
        self.programs.append(("steps", start))
        return None, SimpleNamespace(metrics={"loss": np.float32(len(self.programs))})

    def encode(self, state: None, p: int, shard: int, count: int) -> tuple[None, dict]:
        self.programs.append(("encode", p, shard, count))
        return None, {}

    def forget(self, state: None, fragments: frozenset[int]) -> None:
        self.programs.append(("forget", *sorted(fragments)))

    def receive(self, state: None, p: int, arrays: Any) -> None:
        self.programs.append(("receive", p))
        self.received = arrays


def run_process(
    channel: Channel, syncer: RandomSyncer | None, phases: int = PHASES
) -> tuple[Model, Island]:
    """Join and train as a process of the island does, without threads."""
    link = None
    if syncer is not None:
        link = Link(syncer.call, {"island": "a", "incarnation": "1"}, Model.formats, [-1] * 3)
        link.wait = lambda seconds: exchange_once(link)
    never = SimpleNamespace(should_stop=lambda count: False)
    exchange = SharedLink(link, channel, never)
    membership = exchange.join(lambda error: None, 60.0)
    assert membership.shard == 2 and membership.received == {1: ("old", 7)}
    model = Model()
    parts = SimpleNamespace(steps_per_sync=STEPS, max_steps_ahead=2 * STEPS)
    island = Island(parts, model, exchange, shard=2, process="1", tokens_per_step=1.0)
    for _ in range(phases):
        quiet = SimpleNamespace(note=lambda text: None)
        wait_for_merge(island, exchange, quiet, 60.0)
        island.train(None)
        exchange.wait(0)
    return model, island


def exchange_once(link: Link) -> None:
    try:
        link.exchange()
    except DisconnectedError:
        return
    except RefusedError as error:
        link._fail(error)


@pytest.mark.parametrize("seed", range(4))
def test_all_processes_dispatch_the_same_programs(seed: int, monkeypatch) -> None:
    monkeypatch.setattr("fedpax.islands.island.island.SECONDS_BETWEEN_JOINS", 0.0)
    values: queue.SimpleQueue = queue.SimpleQueue()
    first, one = run_process(Channel(True, values), RandomSyncer(seed))
    second, other = run_process(Channel(False, values), None)
    assert second.programs == first.programs
    kinds = {kind for kind, *_ in first.programs}
    assert kinds == {"init", "steps", "encode", "receive"}
    assert other.ledger.to_json() == one.ledger.to_json() and other.dropped == one.dropped
    assert one.dropped and values.empty()
    assert first.received["w"].shape == (2,) and second.received is None
    # One update per phase, but for a fragment that was not sent for two rounds.
    sent = [p for kind, p, *_ in first.programs[1:] if kind == "encode"]
    assert len(sent) <= PHASES + PHASES // (2 * FRAGMENTS)


@pytest.mark.parametrize("seed", range(4))
def test_all_processes_discard_the_progress_on_a_lost_state(seed: int, monkeypatch) -> None:
    monkeypatch.setattr("fedpax.islands.island.island.SECONDS_BETWEEN_JOINS", 0.0)
    values: queue.SimpleQueue = queue.SimpleQueue()
    syncer = RandomSyncer(seed, loss=0.05)
    first, one = run_process(Channel(True, values), syncer)
    second, other = run_process(Channel(False, values), None)
    assert second.programs == first.programs and values.empty()
    assert 0 < first.programs.count(("forget", 0, 1, 2)) <= syncer.losses
    assert other.ledger.to_json() == one.ledger.to_json()
    assert 0 < int(one.ledger.epoch) <= syncer.losses


def test_a_refusal_reaches_all_processes(monkeypatch) -> None:
    monkeypatch.setattr("fedpax.islands.island.island.SECONDS_BETWEEN_JOINS", 0.0)
    values: queue.SimpleQueue = queue.SimpleQueue()
    syncer = RandomSyncer(0, refuses_after=40)
    for channel, its in ((Channel(True, values), syncer), (Channel(False, values), None)):
        with pytest.raises(RefusedError, match="another island has this name"):
            run_process(channel, its, phases=10**6)
    assert values.empty()
