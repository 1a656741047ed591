"""The table of islands: written by a syncer, shown by `fedpax show`."""

import json
from pathlib import Path

import pytest
from islands.site_problem import Sites
from islands.syncer_methods import parts

from fedpax.commands.show import show
from fedpax.errors import ConfigurationError
from fedpax.islands.syncer.island_table import (
    TABLE_FILE,
    IslandReport,
    IslandWatch,
    format_islands,
    read_islands,
)
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.run_files.metrics import MetricsWriter
from fedpax.training.folder_owners import JobDirLock
from fedpax.training.progress import Progress

PARIS = IslandReport("paris", "training", 0, 640, 2.5, 39, 1, 0, 0.2)
OSLO = IslandReport("oslo", "silent", 1, 12, None, 0, 0, 2, None)


def test_show_prints_the_islands_of_a_syncer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("training", 1, {"loss": 2.5})
    assert read_islands(tmp_path) == []
    with Progress("x", rounds_done=0, rounds=1) as progress:
        watch = IslandWatch(tmp_path, progress)
        watch.update([PARIS, OSLO])
        watch.update([stalled := PARIS._replace(state="stalled"), OSLO])
    assert "island paris (shard 0): training" in (noted := capsys.readouterr().err)
    assert "island paris (shard 0): stalled" in noted and noted.count("oslo") == 1
    assert read_islands(tmp_path) == [stalled, OSLO], "a change is written at once"
    with JobDirLock(tmp_path):  # as a syncer that runs
        assert show([f"--job_log_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "when it stopped" not in printed
    assert "| paris  | stalled |     0 |   640 | 2.5000 |" in printed
    assert "| oslo   |  silent |     1 |    12 |      - |" in printed
    assert show([f"--job_log_dir={tmp_path}"]) == 0
    assert f"Islands of the syncer in {tmp_path}, when it stopped:" in capsys.readouterr().out


def test_an_island_without_a_shard_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = PARIS._replace(shard=None, state="waiting")
    with Progress("x", rounds_done=0, rounds=1) as progress:
        IslandWatch(tmp_path, progress).update([waiting])
    assert "island paris (no shard): waiting" in capsys.readouterr().err
    assert read_islands(tmp_path) == [waiting]
    assert "| paris  | waiting |     - |" in format_islands([waiting, OSLO])


@pytest.mark.xdist_group("sites")
def test_steps_continue_when_an_island_or_the_syncer_restarts(tmp_path: Path) -> None:
    sites = Sites(parts(), quorum=1, store=SyncerStore(tmp_path))
    island = sites.add("a")

    def steps() -> int:
        (report,) = sites.syncer.islands()
        return report.steps

    for taken in (2, 4):
        sites.phase(island)
        sites.receive(island)
        assert steps() == taken
    sites.start_syncer()
    assert steps() == 4  # before it joins again
    sites.receive(island)
    assert steps() == 4
    restarted = sites.add("a", "a-2", steps_before=2)  # of its last checkpoint
    assert steps() == 2
    sites.phase(restarted)
    sites.receive(restarted)
    assert steps() == 4


@pytest.mark.parametrize("content", ["", "[1]", json.dumps([{"name": "paris"}])])
def test_a_damaged_table_is_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / TABLE_FILE).write_text(content)
    assert read_islands(tmp_path) == []


@pytest.mark.parametrize("name", [TABLE_FILE, f".{TABLE_FILE}.draft"])
def test_a_folder_in_the_place_of_the_table_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with Progress("x", rounds_done=0, rounds=1) as progress:
        watch = IslandWatch(tmp_path, progress)
        with pytest.raises(ConfigurationError, match=rf"/{name} is a folder, .* Remove the folder"):
            watch.update([PARIS])
        (tmp_path / name).rmdir()
        watch.update([PARIS], force=True)
    assert read_islands(tmp_path) == [PARIS]
