"""The end of a run of sites: islands that were down, islands without a syncer, and more rounds."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import chex
import pytest
from site_processes import Processes, wait_until
from small_sites import sites_regression

from fedpax.commands.join import describe
from fedpax.sites.join import join
from fedpax.sites.merge_log import read_merges
from fedpax.training.checkpoint import load_params
from fedpax.training.configuration import ConfigurationError, from_json, read_configuration_json
from fedpax.training.metrics import read_metrics, select

pytest.importorskip("grpc")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.end()


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
    syncer = processes.start("syncer", "syncer", "--training.rounds=10", log="more")
    wait_until(lambda: "listening at" in processes.log("more"), processes)
    a, b = (processes.start("join", name) for name in "ab")
    assert [process.wait(400) for process in (syncer, a, b)] == [0, 0, 0], processes.logs()
    assert [merge["merge"] for merge in read_merges(tmp_path / "syncer")] == list(range(1, 21))
    assert len(select(read_metrics(tmp_path / "syncer"), "training")) == 10
    found = read_configuration_json(tmp_path / "a")
    assert found is not None and from_json(found[1]).training.rounds == 10


@pytest.mark.slow
def test_an_older_state_replaces_later_checkpoints(processes: Processes, tmp_path: Path) -> None:
    def train() -> None:
        started = [processes.start("syncer", "syncer", "--training.rounds=6")]
        started += [processes.start("join", name) for name in "ab"]
        assert [process.wait(400) for process in started] == [0, 0, 0], processes.logs()

    train()
    folder = tmp_path / "syncer"
    before = load_params(folder)
    max((folder / "syncer").glob("*.journal")).unlink()  # as in an older copy
    for name in "ab":
        shutil.rmtree(tmp_path / name)
    train()
    aside = folder / "checkpoint_6_before_round_5_resumed"
    assert f"Moved {folder / 'checkpoints' / '6'} to {aside}" in processes.log("syncer")
    shutil.copytree(aside, tmp_path / "aside" / "checkpoints" / "6")
    chex.assert_trees_all_equal(load_params(tmp_path / "aside"), before)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(load_params(folder, 6), before)
    assert [merge["merge"] for merge in read_merges(folder)] == list(range(1, 13))
