"""An island of two processes beside an island of one: same result, one end, one return."""

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from site_processes import Processes, updates_of, wait_until

from fedpax.checkpoints.saved_state import load_params
from fedpax.islands.syncer.logs import read_merges
from fedpax.run_files.metrics import read_metrics, select
from fedpax.run_files.paths import complete_rounds, latest_round

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    sites = Processes(tmp_path)
    yield sites
    sites.end()


def statuses(processes: Sequence[subprocess.Popen]) -> list[int]:
    return [process.wait(900) for process in processes]


def test_two_processes_are_an_island_like_one_on_as_many_devices(tmp_path: Path) -> None:
    """In lockstep: a merge waits for both islands, and an island for each merge."""
    lockstep = ["--quorum=2", "--max_steps_ahead=2", "--pause=0.0", "--training.rounds=10"]
    results = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        running = Processes(folder)
        started = [
            running.start("syncer", "syncer", *lockstep),
            running.start("join", "b", "--shard=1", *lockstep),
        ]
        island = ["--shard=0", "--mesh.fsdp=2", *lockstep]
        if count == 1:
            started.append(running.start("join", "a", *island, JAX_NUM_CPU_DEVICES="2"))
        else:
            started += running.start_island("a", 2, *island)
        try:
            assert statuses(started) == [0] * len(started), running.logs()
        finally:
            running.end()
        lines = select(read_metrics(folder / "syncer"), "training")
        assert [line["participants"] for line in lines] == [2.0] * 10
        assert sum(line["late"] for line in lines) == 0
        results.append((load_params(folder / "syncer"), [line["loss"] for line in lines]))
    (one, one_loss), (two, two_loss) = results
    np.testing.assert_allclose(two_loss, one_loss, rtol=1e-5)
    assert two_loss[-1] < 0.9 * two_loss[0]
    for name in one:  # collectives between processes add in another order
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6)
    assert "2 cpu devices, mesh fsdp=2" in (tmp_path / "2" / "a0.log").read_text()
    quiet = (tmp_path / "2" / "a1.log").read_text().splitlines()
    assert [line for line in quiet if "fedpax" in line or "sites_regression" in line] == []


def test_an_island_whose_processes_are_killed_or_stopped_returns(
    processes: Processes, tmp_path: Path
) -> None:
    run = ["--training.rounds=40", "--quorum=2"]  # no merge without both islands
    more = [*run, "--mesh.fsdp=2", "--training.checkpoint_every=2"]
    syncer = processes.start("syncer", "syncer", *run)
    other = processes.start("join", "b", *run)
    for victim in (1, 0):
        island = processes.start_island("a", 2, *more)
        before = len(updates_of(tmp_path / "syncer"))
        kept = latest_round(tmp_path / "a") or 0
        wait_until(lambda kept=kept: (latest_round(tmp_path / "a") or 0) >= kept + 4, processes)
        # The other island may start slowly; without it there is no merge.
        wait_until(lambda before=before: len(updates_of(tmp_path / "syncer")) > before, processes)
        island[victim].kill()
        began = time.monotonic()
        survivor = island[1 - victim]
        assert survivor.wait(60) == 75, processes.logs()
        assert time.monotonic() - began < 20
        log = processes.log(f"a{1 - victim}")
        assert f"process {victim} on" in log and "has ended, and without it the island" in log
        assert "start all processes of the island again: it returns with the state after" in log
    island = processes.start_island("a", 2, *more)
    wait_until(lambda: processes.log("a0").count("resuming after its round") == 2, processes)
    kept = latest_round(tmp_path / "a") or 0
    wait_until(lambda: len(select(read_metrics(tmp_path / "a"), "training")) > kept + 2, processes)
    island[1].send_signal(signal.SIGTERM)  # to the process that does not talk to the syncer
    assert statuses(island) == [143, 143], processes.logs()
    saved = latest_round(tmp_path / "a") or 0
    assert saved == read_metrics(tmp_path / "a")[-1]["round"] > kept
    assert complete_rounds(tmp_path / "a" / "checkpoints")[-1] == saved
    assert f"SIGTERM: {saved} rounds of this island are saved" in processes.log("a0")
    island = processes.start_island("a", 2, *more)
    assert statuses([syncer, other, *island]) == [0, 0, 0, 0], processes.logs()

    merges = read_merges(tmp_path / "syncer")
    assert [merge["merge"] for merge in merges] == list(range(1, 81))
    updates = updates_of(tmp_path / "syncer")
    assert len(updates) == len(set(updates))  # nothing is applied twice
    assert len({process for island, process, *_ in updates if island == "a"}) == 4
    # The same commands have nothing to do.
    assert statuses(processes.start_island("a", 2, *more)) == [0, 0]
