"""The end of a run of sites: islands that were down, islands without a syncer, and more rounds."""

import dataclasses
import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import pytest
from islands.site_problem import Sites
from islands.small_sites import STEPS, sites_regression
from islands.syncer_methods import parts
from site_processes import Processes, wait_until

from fedpax.checkpoints import load_params
from fedpax.commands.join import describe
from fedpax.errors import ConfigurationError
from fedpax.islands.island.island import SharedLink
from fedpax.islands.island.join import join
from fedpax.islands.island.link import Link
from fedpax.islands.syncer.island_table import read_islands
from fedpax.islands.syncer.logs import read_merges
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.run_files.configuration import read_configuration_json
from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.site_process import WIRE_FORMAT
from fedpax.transport.message import Message

pytest.importorskip("grpc")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    sites = Processes(tmp_path)
    yield sites
    sites.end()


def test_an_island_without_a_syncer_stops_in_words(tmp_path: Path) -> None:
    result = join(sites_regression(), tmp_path / "a", "127.0.0.1:1", give_up_after=0.3)
    assert result == (0, False, None, True)
    words = describe(result, "runs/a", "127.0.0.1:1")
    assert "no syncer answers at 127.0.0.1:1" in words and "Start the syncer, then run" in words
    (tmp_path / "a").mkdir(exist_ok=True)
    (tmp_path / "a" / "island.json").write_text('{"folder": "1", "run": "2", "finished": true}')
    result = join(sites_regression(), tmp_path / "a", "127.0.0.1:1", give_up_after=0.3)
    assert result == (0, True, None, True)
    assert "if it has more rounds, start it first" in describe(result, "runs/a", "127.0.0.1:1")
    for damaged in ("", "\0", "null", '{"folders": 1}'):
        (tmp_path / "a" / "island.json").write_text(damaged)
        with pytest.raises(
            ConfigurationError, match=r"island\.json cannot be read .* or delete it"
        ):
            join(sites_regression(), tmp_path / "a", "127.0.0.1:1", give_up_after=0.3)


def test_a_setting_of_the_training_that_islands_do_not_read_is_told(tmp_path: Path) -> None:
    experiment = sites_regression()
    training = dataclasses.replace(experiment.training, hang_after=60.0)
    experiment = dataclasses.replace(experiment, training=training)
    with pytest.raises(ConfigurationError, match=r"hang_after=60.0 has no effect on islands"):
        join(experiment, tmp_path / "a", "127.0.0.1:1", give_up_after=0.3)


class EndingSyncer:
    """A syncer whose last merge ends before its n-th message; it reads `island.json` at each."""

    max_message_bytes = 0

    def __init__(self, folder: Path, ends_before: int) -> None:
        self.file, self.ends_before = folder / "island.json", ends_before
        self.heard: list[tuple[str, bool]] = []
        self.files: list[Any] = []

    def call(self, message: Message, timeout: float) -> Message:
        kind = message.header["kind"]
        self.heard.append((kind, message.header["heard_end"]))
        self.files.append(json.loads(self.file.read_bytes()) if self.file.exists() else None)
        finished = len(self.heard) > self.ends_before
        header = {"status": "ok", "merges": 119 + finished, "finished": finished, "saved": {}}
        if kind == "join":
            header |= {"run": "r", "wire_format": WIRE_FORMAT, "rounds": 60, "shard": 0}
            header |= {"heartbeat_seconds": 60.0, "received": {}}
        return Message(header)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("ends_before", [0, 1])
def test_the_end_just_after_the_join_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_before: int
) -> None:
    syncer = EndingSyncer(tmp_path / "a", ends_before)
    module = importlib.import_module("fedpax.islands.island.join")
    monkeypatch.setattr(module, "connect", lambda *args, **settings: syncer)
    # The first messages of the threads, as if they came before anything else.
    monkeypatch.setattr(Link, "start", lambda link: [link.exchange(), link.exchange()])
    result = join(sites_regression(), tmp_path / "a", "127.0.0.1:1")
    assert result == (0, True, None, False)
    pulls = [("pull", False), ("pull", True)] if ends_before else []
    assert syncer.heard == [("join", False), *pulls, ("leave", True)]
    for (_, heard_end), content in zip(syncer.heard[1:], syncer.files[1:], strict=True):
        assert content["run"] == "r" and content["finished"] == heard_end


@pytest.mark.parametrize("extended", [False, True])
def test_an_island_of_an_extended_run_waits_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:
    """In a finished folder an island asks for 15 s whether there are more rounds, and then not."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "island.json").write_text('{"folder": "1", "run": "r", "finished": true}')
    syncer, asked = EndingSyncer(tmp_path / "a", 10**9), []
    module = importlib.import_module("fedpax.islands.island.join")
    monkeypatch.setattr(module, "connect", lambda *args, **settings: syncer)
    monkeypatch.setattr(Link, "start", lambda link: None)
    inner = SharedLink.join

    def ask(link: SharedLink, on_wait: Any, seconds: float) -> Any:
        asked.append(seconds)
        return inner(link, on_wait, seconds) if extended else None

    def wait(*waits: Any) -> float:
        asked.append(waits[-1])
        return 0.0

    monkeypatch.setattr(SharedLink, "join", ask)
    monkeypatch.setattr("fedpax.islands.island.training_rounds.wait_for_merge", wait)
    result = join(sites_regression(), tmp_path / "a", "127.0.0.1:1")
    assert result == (0, not extended, None, True)
    assert asked == ([15.0, 600.0] if extended else [15.0])


@pytest.mark.xdist_group("sites")
def test_the_syncer_notes_an_island_that_leaves_at_the_end(tmp_path: Path) -> None:
    sites = Sites(parts(), quorum=1, num_merges=1, store=SyncerStore(tmp_path))
    link = Link(sites.call, sites.header("a", "a-1"), sites.model.formats, [-1, -1])
    link.join()
    inner = sites.syncer._lock

    class Lock:
        """The syncer's lock; the last merge ends just before a message gets it."""

        def __enter__(self) -> None:
            inner.acquire()
            sites.syncer.merges = 1

        def __exit__(self, *exception: object) -> None:
            inner.release()

    sites.syncer._lock = Lock()
    link.close()
    sites.syncer._lock = inner
    assert link.finished and sites.syncer.everyone_heard_end
    sites.start_syncer()  # it is saved too
    assert sites.syncer.everyone_heard_end


@pytest.mark.slow
def test_islands_that_were_down_learn_the_end_and_get_more_rounds(
    processes: Processes, tmp_path: Path
) -> None:
    few = "--training.rounds=6"
    syncer = processes.start("syncer", "syncer", few, "--goodbye_seconds=2")
    a, b = (processes.start("join", name) for name in "ab")
    wait_until(lambda: len(select(read_metrics(tmp_path / "b"), "training")) > 1, processes)
    b.kill()
    assert [process.wait(400) for process in (syncer, a)] == [0, 0], processes.logs()
    assert "finished; islands can learn it for 2 s" in processes.log("syncer")
    assert "the run has 6 rounds at the syncer" in processes.log("a")  # and 60 by its flags
    merges = len(read_merges(tmp_path / "syncer"))
    assert merges == 12
    # An island meets nobody.
    b = processes.start("join", "b", "--give_up_after=0.5")
    assert b.wait(400) == 75, processes.log("b")
    assert "no syncer answers at" in processes.log("b")
    # The finished syncer is started again: b learns the end. Then nobody has to learn it.
    syncer = processes.start("syncer", "syncer", few, "--goodbye_seconds=300")
    b = processes.start("join", "b")
    assert [process.wait(400) for process in (b, syncer)] == [0, 0], processes.logs()
    syncer = processes.start("syncer", "syncer", few, log="again")
    assert syncer.wait(400) == 0 and "islands can learn it" not in processes.log("again")
    assert len(read_merges(tmp_path / "syncer")) == merges
    # More rounds, of which only the syncer is told.
    trained = len(select(read_metrics(tmp_path / "a"), "training"))
    every = ["--training.evaluate_every=3", "--allow_config_change=training.evaluate_every"]
    syncer = processes.start("syncer", "syncer", "--training.rounds=10", *every, log="more")
    wait_until(lambda: "listening at" in processes.log("more"), processes)
    a, b = (processes.start("join", name) for name in "ab")
    assert [process.wait(400) for process in (syncer, a, b)] == [0, 0, 0], processes.logs()
    assert [merge["merge"] for merge in read_merges(tmp_path / "syncer")] == list(range(1, 21))
    assert len(select(read_metrics(tmp_path / "syncer"), "training")) == 10
    steps = {island.name: island.steps for island in read_islands(tmp_path / "syncer")}
    assert steps["a"] > STEPS * trained  # the steps before are counted too
    content = read_configuration_json(tmp_path / "a")
    assert content is not None and content[1]["training"]["rounds"] == 10
    assert "training.evaluate_every=3 has no effect: a syncer" in processes.log("more")


@pytest.mark.slow
def test_an_older_state_replaces_later_checkpoints(processes: Processes, tmp_path: Path) -> None:
    def train(*flags: str, log: str = "syncer") -> None:
        started = [processes.start("syncer", "syncer", "--training.rounds=6", *flags, log=log)]
        wait_until(lambda: "listening at" in processes.log(log), processes)
        started += [processes.start("join", name) for name in "ab"]
        assert [process.wait(400) for process in started] == [0, 0, 0], processes.logs()

    train()
    folder = tmp_path / "syncer"
    before = load_params(folder)
    max((folder / "syncer").glob("*.journal")).unlink()  # as in an older copy
    refused = processes.start("syncer", "syncer", "--training.rounds=6", log="refused")
    assert refused.wait(400) != 0
    assert "start once with --allow_older_state" in processes.log("refused")
    train("--allow_older_state", log="older")  # islands that have later merges discard them
    aside = folder / "checkpoint_6_before_round_5_resumed"
    assert f"Moved {folder / 'checkpoints' / '6'} to {aside}" in processes.log("older")
    shutil.copytree(aside, tmp_path / "aside" / "checkpoints" / "6")
    chex.assert_trees_all_equal(load_params(tmp_path / "aside"), before)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(load_params(folder, 6), before)
    assert [merge["merge"] for merge in read_merges(folder)] == list(range(1, 13))
