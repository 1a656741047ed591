"""Expelled sites: their file, the syncer that reads it, and the islands that are told."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from islands.site_problem import Sites
from islands.syncer_methods import three
from site_processes import Processes, wait_until

from fedpax.errors import ConfigurationError
from fedpax.islands.syncer.island_table import read_islands
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.transport.admission import EXPELLED_FILE, admit, expel, read_expulsions


def test_sites_are_expelled_and_admitted(tmp_path: Path) -> None:
    assert read_expulsions(tmp_path) == {} and not admit(tmp_path, "a")
    expel(tmp_path, "a", "it left")
    expel(tmp_path, "b", "3 malformed messages", by="rule")
    expel(tmp_path, "a", "twice: the first reason stays")
    content = read_expulsions(tmp_path)
    assert [(name, e.reason, e.by) for name, e in content.items()] == [
        ("a", "it left", "command"),
        ("b", "3 malformed messages", "rule"),
    ]
    assert admit(tmp_path, "a") and list(read_expulsions(tmp_path)) == ["b"]


def test_no_change_of_several_at_once_is_lost(tmp_path: Path) -> None:
    names = [f"site-{i}" for i in range(16)]
    threads = [threading.Thread(target=expel, args=(tmp_path, name, "x")) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_expulsions(tmp_path)) == sorted(names)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"a": 1}', '{"a": {"reason": "x"}}', '{"a": {"x": 1}}']
)
def test_a_damaged_file_admits_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / EXPELLED_FILE).write_text(content)
    with pytest.raises(ConfigurationError, match=r"expelled\.json is damaged, .* Restore the"):
        read_expulsions(tmp_path)
    with pytest.raises(ConfigurationError):
        expel(tmp_path, "a", "x")
    assert (tmp_path / EXPELLED_FILE).read_text() == content


@pytest.mark.parametrize("name", ["", "a" * 201, "a\x1b[2J", "a\n"])
def test_names_that_cannot_be_shown(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="printable characters"):
        expel(tmp_path, name, "x")
    with pytest.raises(ValueError, match="printable characters"):
        expel(tmp_path, "a", name)
    assert read_expulsions(tmp_path) == {}


@pytest.mark.xdist_group("sites")
class TestSyncer:
    """The rules of a syncer whose sites are expelled."""

    @pytest.fixture
    def expelled(self) -> set[str]:
        return set()

    @pytest.fixture
    def sites(self, expelled: set[str], tmp_path: Path) -> Sites:
        options = {"is_expelled": expelled.__contains__}
        return three(quorum=2, options=options, store=SyncerStore(tmp_path), max_norm=100.0)

    def states(self, sites: Sites) -> dict[str, tuple[str, int | None]]:
        return {island.name: (island.state, island.shard) for island in sites.syncer.islands()}

    def test_its_waiting_update_is_in_no_merge(self, sites: Sites, expelled: set[str]) -> None:
        assert sites.push("a", 50.0) == "accepted"
        expelled.add("a")
        assert sites.push("b", 1.0) == "accepted"
        assert not sites.reports  # b alone is no quorum
        assert sites.push("c", 1.0) == "accepted"
        assert sites.reports[-1].islands == ("b", "c")

    def test_a_merge_does_not_wait_for_it(self, sites: Sites, expelled: set[str]) -> None:
        sites.syncer._quorum._voters, sites.syncer._quorum._grace = 2, 1e6
        sites.push("b", 1.0), sites.push("c", 1.0)
        assert not sites.reports
        expelled.add("a")
        sites.syncer.advance()
        assert sites.reports[-1].islands == ("b", "c")

    def test_its_shard_is_free_and_it_may_return(self, sites: Sites, expelled: set[str]) -> None:
        expelled.add("b")
        sites.syncer.advance()
        assert self.states(sites) == {
            "a": ("starting", 0),
            "b": ("expelled", None),
            "c": ("starting", 2),
        }
        assert sites.push("b", 1.0) == "join"  # as if the guard let it pass
        sites.start_syncer()
        sites.syncer.advance()
        assert self.states(sites)["b"] == ("expelled", None)
        expelled.clear()
        sites.syncer.advance()
        sites.add("b", process="b-2")
        assert self.states(sites)["b"] == ("starting", 1)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    sites = Processes(tmp_path)
    yield sites
    sites.end()


@pytest.mark.slow
def test_a_running_island_is_told_and_stays_out(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "syncer"
    syncer = processes.start("syncer", "syncer", "--goodbye_seconds=5")
    a, b = (processes.start("join", name) for name in "ab")
    wait_until(lambda: {"a", "b"} <= processes.islands_since(0), processes)
    expel(folder, "a", "it sold the model")
    assert a.wait(20) == 2, processes.logs()
    words = "site 'a' is expelled from this run (it sold the model)"
    assert words in processes.log("a")
    states = {island.name: island.state for island in read_islands(folder)}
    wait_until(
        lambda: {i.name: i.state for i in read_islands(folder)}["a"] == "expelled", processes
    )
    assert states["b"] in ("starting", "training")
    syncer.send_signal(signal.SIGKILL)
    syncer.wait()
    syncer = processes.start("syncer", "syncer", "--goodbye_seconds=5")
    assert processes.start("join", "a").wait(120) == 2
    assert processes.log("a").count(words) == 2
    assert list(json.loads((folder / EXPELLED_FILE).read_text())) == ["a"]
    assert [process.wait(400) for process in (syncer, b)] == [0, 0], processes.logs()
