"""Shards and names of islands: kept through long pauses, and never given to another site."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from islands.site_problem import Sites, random_batches
from islands.syncer_methods import three
from site_processes import Processes, wait_until

from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.transport.calls import RefusedError, WaitingError
from fedpax.transport.message import Message

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("sites")

FREE_AFTER = 1800.0


def join(sites: Sites, name: str, peer: str = "", process: str = "") -> dict:
    header = sites.header(name, process or f"{name}-1", kind="join", steps=0)
    return dict(sites.call(Message(header), peer=peer).header)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_pause_costs_no_shard(leaves: bool) -> None:
    sites = three(quorum=1)
    if leaves:  # as after SIGTERM, before it is started again
        sites.links[1].connected = True
        sites.links[1].close()
    sites.now += 0.99 * FREE_AFTER
    for name in ("a", "c"):
        sites.receive(sites.islands["abc".index(name)])
    with pytest.raises(RefusedError, match=r"after 1800 s without a message .--free_shard_after"):
        join(sites, "d")
    if leaves:
        assert join(sites, "b", process="b-2")["shard"] == 1
    else:
        sites.phase(sites.islands[1])
        assert sites.reports[-1].islands == ("b",)


def test_a_restarted_syncer_gives_no_shard_away(tmp_path: Path) -> None:
    sites = three(quorum=1, store=SyncerStore(tmp_path))
    sites.now += 10 * FREE_AFTER
    sites.start_syncer()
    with pytest.raises(RefusedError, match="all 3 shards are in use"):
        join(sites, "d")


def test_an_island_whose_shard_was_taken_waits_with_its_steps(tmp_path: Path) -> None:
    sites = three(quorum=1, store=SyncerStore(tmp_path))
    a, b, c = sites.islands
    sites.down = True
    sites.phase(b)  # cut off: its update waits in its link
    sites.down = False
    sites.now += FREE_AFTER + 1
    for island in (a, c):
        sites.receive(island)
    assert join(sites, "d", peer="")["shard"] == 1
    with pytest.raises(WaitingError, match=r"in use by other islands .a, c, d"):
        sites.links[1].exchange()  # hears that it has to join
        sites.links[1].exchange()
    b.receive()
    assert b.status.shard is None and b.status.connected and not b.must_stop()
    states = {island.name: (island.state, island.shard) for island in sites.syncer.islands()}
    assert states["b"] == ("waiting", None) and states["d"] == ("starting", 1)
    json.dumps([island._asdict() for island in sites.syncer.islands()])

    for restarted in (False, True):
        if restarted:
            sites.start_syncer()
        with pytest.raises(RefusedError, match="belongs to the certificate '', not to 'mallory'"):
            join(sites, "b", peer="mallory")
        assert join(sites, "b")["status"] == "wait"
    for island in (a, b):
        sites.phase(island)
        sites.receive(island)
    assert sites.reports[-1].islands == ("a",) and b.ledger.fragments[1].steps == 4
    sites.now += FREE_AFTER + 1  # c and d are gone
    sites.receive(a)
    sites.receive(b)
    assert b.shard == 1
    for _ in range(4):
        sites.phase(b)
        sites.receive(b)
    own = [report for report in sites.reports if "b" in report.islands and report.merge % 2]
    merged = sum(report.steps for report in own)  # of fragment 0
    assert merged + b.ledger.fragments[0].steps == b.steps == 12


def test_an_update_is_decoded_for_the_shard_that_it_was_encoded_for() -> None:
    collected = []
    for moves in (False, True):
        sites = three("compressed", quorum=1)
        sites.down = True
        sites.phase(sites.islands[1], random_batches((2,), seed=5))
        sites.down = False
        if moves:
            sites.now += FREE_AFTER + 1
            assert join(sites, "d")["shard"] == 0 and join(sites, "e")["shard"] == 1
            sites.now += FREE_AFTER + 1
        for _ in range(2):  # learn that it has to join; join and send
            sites.receive(sites.islands[1])
        assert sites.reports[-1].islands == ("b",)
        collected.append((sites.islands[1].shard, sites.params()))
    assert [shard for shard, _ in collected] == [1, 2]
    for name, want in collected[0][1].items():
        np.testing.assert_array_equal(collected[1][1][name], want)


def test_an_island_that_waits_learns_the_end() -> None:
    sites = three(quorum=1, num_merges=1)
    sites.now += FREE_AFTER + 1
    for island in sites.islands[1:]:
        sites.receive(island)
    join(sites, "d")
    with pytest.raises(WaitingError):
        sites.links[0].exchange()
        sites.links[0].exchange()
    sites.push("d", 0.1)
    sites.links[0].exchange()
    sites.islands[0].receive()
    assert sites.islands[0].must_stop()
    sites.links[0].close()
    assert [i.state for i in sites.syncer.islands() if i.name == "a"] == ["finished"]


@pytest.mark.slow
def test_processes_whose_shards_were_taken_wait_and_train_on(tmp_path: Path) -> None:
    """One that was stopped, and one that was killed and started again."""
    processes = Processes(tmp_path)
    syncer = lambda words: wait_until(lambda: words in processes.log("syncer"), processes)
    try:
        processes.start("syncer", "syncer", "--training.rounds=1000000", "--free_shard_after=1")
        a = processes.start("join", "a")
        syncer("island a (shard 0): training")
        b = processes.start("join", "b")
        wait_until(lambda: processes.islands_since(0) == {"a", "b"}, processes)
        a.send_signal(signal.SIGSTOP)
        b.kill()
        syncer("island a (shard 0): silent")
        syncer("island b (shard 1): silent")
        c, d = (processes.start("join", name, f"--shard={k}") for k, name in enumerate("cd"))
        wait_until(lambda: processes.islands_since(0) == set("abcd"), processes)
        a.send_signal(signal.SIGCONT)
        syncer("island a (no shard): waiting")
        d.send_signal(signal.SIGTERM)  # a waits for any shard
        syncer("island a (shard 1): ")
        processes.start("join", "b", "--shard=0")
        wait_until(lambda: "waiting: shard 0 is in use by" in processes.log("b"), processes)
        c.send_signal(signal.SIGTERM)
        assert [process.wait(240) for process in (c, d)] == [143, 143]
        at = processes.merges()
        wait_until(lambda: processes.islands_since(at) == {"a", "b"}, processes)
        assert a.poll() is None and "has shard 1 now, another island has 0" in processes.log("a")
    finally:
        processes.end()
