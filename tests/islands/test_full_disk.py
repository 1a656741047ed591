"""A syncer whose disk is full: it does not answer before the answer's record is on the disk."""

import contextlib
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import pytest

pytest.importorskip("grpc")
from islands.site_problem import Sites, random_batches
from islands.syncer_methods import parts
from small_disk import small_disk_at

from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message

Full = Callable[[Sites], AbstractContextManager[None]]


@pytest.fixture(params=["file size", "disk"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Full]:
    """Return a context in which the syncer's journal in `tmp_path` cannot grow."""

    @contextlib.contextmanager
    def at_its_limit(sites: Sites) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = max((tmp_path / "syncer").iterdir()).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    @contextlib.contextmanager
    def without_space(sites: Sites) -> Iterator[None]:
        filler = tmp_path / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with contextlib.suppress(OSError):  # the journal's last block has room
            while True:
                sites.store.save_manifest(sites.syncer._manifest())
        try:
            yield
        finally:
            filler.unlink()

    if request.param == "file size":
        yield at_its_limit
        return
    with small_disk_at(tmp_path, "128k"):
        yield without_space


def beat(sites: Sites, name: str, process: str, **more: object) -> str:
    header = {"kind": "heartbeat", "island": name, "incarnation": process, "steps": 0}
    return sites.call(Message(header | {"seconds_per_update": 1.0} | more)).header["status"]


def test_an_island_that_cannot_be_saved_does_not_join(full: Full, tmp_path: Path) -> None:
    sites = Sites(parts(), quorum=1, store=SyncerStore(tmp_path))
    sites.add("a")
    for _ in range(2):
        with full(sites):
            for name, process in (("b", "b-1"), ("a", "a-2")):
                for _ in range(2):
                    with pytest.raises(RefusedError, match=r"cannot save .* joins .*Free some at"):
                        sites.add(name, process=process)
            assert beat(sites, "b", "b-1") == "join"
            assert beat(sites, "a", "a-1") == "ok"  # its process was not replaced
            assert [island.name for island in sites.syncer.islands()] == ["a"]
        sites.start_syncer()
        assert [island.name for island in sites.syncer.islands()] == ["a"]
        sites.add("a")
    sites.add("b")
    sites.start_syncer()
    result = sites.syncer.islands()
    assert [(island.name, island.shard) for island in result] == [("a", 0), ("b", 1)]


def test_who_heard_the_end_is_told_after_it_is_saved(full: Full, tmp_path: Path) -> None:
    sites = Sites(parts(), quorum=1, num_merges=1, store=SyncerStore(tmp_path))
    island = sites.add("a")
    with jax.set_mesh(sites.run.mesh):
        for _ in range(2):
            island.train(random_batches((2,)))
    island._hand_over()
    update = next(iter(island._link._outbox.values()))
    push = {"kind": "push", "island": "a", "incarnation": "a-1", "steps": 2, **update.header}
    sites.call(Message(push, jax.device_get(update.arrays)))
    assert sites.syncer.finished
    with full(sites):
        for _ in range(2):
            with pytest.raises(OSError):
                beat(sites, "a", "a-1", heard_end=True)
        assert not sites.syncer.everyone_heard_end
    sites.start_syncer()
    assert not sites.syncer.everyone_heard_end
    sites.add("a", process="a-2")
    assert beat(sites, "a", "a-2", heard_end=True) == "ok"
    sites.start_syncer()
    assert sites.syncer.everyone_heard_end
