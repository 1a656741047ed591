"""A syncer that restores an older state, and islands of the history that it has lost."""

import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("grpc")
from islands.site_problem import TOKENS_PER_STEP, Sites
from islands.syncer_methods import parts

from fedpax.islands.island.island import Island
from fedpax.islands.island.link import Link
from fedpax.islands.syncer.logs import read_merges
from fedpax.islands.syncer.members import Epochs
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message


def merge(sites: Sites, island: Island, times: int) -> None:
    for _ in range(times):
        sites.now += 3  # the other islands are silent
        sites.phase(island)
        sites.receive(island)


@pytest.fixture(params=["syncer", "folder"])
def sites(request: pytest.FixtureRequest, tmp_path: Path) -> Sites:
    """A syncer that has restored the state after 2 of 5 merges, and does not answer yet.

    The copy is one of `syncer/`, or one of the run's folder, which tells of no later merge.
    Island a has all 5 merges and unsent progress, island b has 2 and unsent progress.
    """
    folder, copy = tmp_path / "run", tmp_path / "copy"
    sites = Sites(parts(), quorum=1, store=SyncerStore(folder))
    a, b = sites.add("a"), sites.add("b")
    merge(sites, a, 2)
    sites.receive(b)
    assert a.ledger.versions() == b.ledger.versions() == [1, 1]
    shutil.copytree(folder, copy)
    merge(sites, a, 3)
    sites.phase(a)
    assert a.ledger.versions() == [3, 2] and sites.syncer.merges >= 5
    sites.down = True
    for island in (a, b):
        sites.phase(island)
    if request.param == "syncer":
        (copy / "merges.jsonl").unlink()
        shutil.copy(folder / "merges.jsonl", copy)
    shutil.rmtree(folder)
    shutil.move(copy, folder)
    sites.store = SyncerStore(folder, allow_older=request.param == "syncer")
    sites.start_syncer()
    assert sites.syncer.merges == 2
    sites.store = SyncerStore(folder)
    return sites


@pytest.mark.each_value
@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("restarts", [0, 2])
def test_an_island_of_the_lost_history_takes_the_model(
    sites: Sites, tmp_path: Path, passed: bool, restarts: int, caplog: pytest.LogCaptureFixture
) -> None:
    a = sites.islands[0]
    sites.down = False
    if passed:
        c = sites.add("c")
        merge(sites, c, 8)  # more than the lost history had
    for _ in range(restarts):  # from the newest state
        sites.start_syncer()
    merges, discarded = sites.syncer.merges, []
    a._on_discard = discarded.append
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sites.receive(a)
    assert "island 'a' has merges that are not in this state of the run" in caplog.text
    assert discarded == [max(discarded)] and discarded[0] > 0
    assert sites.syncer.merges == merges and not a._link._outbox
    for name, want in sites.params().items():
        np.testing.assert_array_equal(a.state.params[name], want)
    assert a.ledger.versions() == [state.version for state in sites.outer.fragments]
    merge(sites, a, 2)  # it trains on, in this history
    assert sites.syncer.merges == merges + 2
    assert discarded == [max(discarded)]
    numbers = [line["merge"] for line in read_merges(tmp_path / "run")]
    assert numbers == list(range(1, merges + 3))
    sequences = [
        update["sequence"]
        for line in read_merges(tmp_path / "run")[2:]
        for update in line["updates"]
        if update["island"] == "a"
    ]
    assert len(sequences) == 2


def test_an_island_that_has_no_lost_merge_keeps_its_progress(
    sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    _, b = sites.islands
    sites.down = False
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sites.receive(b)
    assert caplog.text == "" and sites.syncer.merges > 2
    assert sites.reports[-1].islands == ("b",)


@pytest.mark.each_value
@pytest.mark.parametrize("of_lost_history", [True, False])
def test_an_island_that_starts_again_from_its_checkpoint(
    sites: Sites, of_lost_history: bool
) -> None:
    old = sites.islands[0 if of_lost_history else 1]
    state, ledger = jax.device_get(old.state), old.ledger.to_json()
    sites.down = False
    c = sites.add("c")
    merge(sites, c, 8)
    header = sites.header("ab"[not of_lost_history], "new")
    versions = [fragment["version"] for fragment in ledger["fragments"]]
    link = Link(sites.call, header, sites.model.formats, versions, epoch=ledger["epoch"])
    member, discarded = link.join(), []
    with jax.set_mesh(sites.run.mesh):
        island = Island(
            sites.parts,
            sites.model,
            link,
            shard=member.shard,
            process="new",
            tokens_per_step=TOKENS_PER_STEP,
            on_discard=discarded.append,
        )
        island.restore(jax.device_put(state), ledger, member.received)
        link.exchange()
        island.receive()
    assert bool(discarded) == of_lost_history
    for name, want in sites.params().items():
        np.testing.assert_allclose(island.state.sent_params[name], want)
        if of_lost_history:
            np.testing.assert_array_equal(island.state.params[name], want)


def test_a_malformed_history_is_refused_before_the_island_joins() -> None:
    sites = Sites(parts(), quorum=1)
    for fields in ({"epoch": 1}, {"epoch": "e"}, {"epoch": "e", "versions": [0]}):
        with pytest.raises(RefusedError, match=r"field '(epoch|versions)' is .* expected"):
            sites.call(Message(sites.header("a", "a-1", kind="join", **fields)))
        assert sites.syncer.islands() == []


def test_merges_of_a_lost_state_are_not_in_the_history():
    first = Epochs(num_fragments=2)
    name, saved = first.current, first.to_json()
    restored = Epochs(2, saved, merges=3)  # from a copy; the newest state had 5 merges
    assert restored.include(name, versions=[2, 1], merges=9)  # 3 merges
    assert not restored.include(name, versions=[2, 2], merges=9)  # 4 merges
