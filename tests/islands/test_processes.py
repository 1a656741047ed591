"""A syncer and two islands as processes over loopback, of which each is killed once."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from site_processes import Processes, updates_of, wait_until

from fedpax.checkpoints import load_params
from fedpax.islands.syncer.logs import read_merges
from fedpax.run_files.metrics import read_metrics, select
from fedpax.run_files.paths import latest_round

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    sites = Processes(tmp_path)
    yield sites
    sites.end()


def test_every_process_is_killed_once(processes: Processes, tmp_path: Path) -> None:
    # However slowly an island starts, the run does not end before it has returned.
    endless = "--training.rounds=1000000"
    syncer = processes.start("syncer", "syncer", endless)
    first, second = (processes.start("join", name) for name in "ab")
    wait_until(lambda: processes.islands_since(0) == {"a", "b"}, processes)
    wait_until(lambda: latest_round(tmp_path / "a") is not None, processes)
    first.kill()
    first.wait()
    at = processes.merges()
    wait_until(lambda: processes.merges() > at + 10, processes)  # b trains on
    at = processes.merges()
    first = processes.start("join", "a")
    wait_until(lambda: "a" in processes.islands_since(at), processes)
    assert "resuming after its round" in processes.log("a")
    syncer.kill()
    syncer.wait()
    lines = len(read_metrics(tmp_path / "b"))
    wait_until(lambda: len(read_metrics(tmp_path / "b")) > lines + 3, processes)  # b trains on
    at = processes.merges()
    syncer = processes.start("syncer", "syncer", endless)
    wait_until(lambda: processes.islands_since(at) == {"a", "b"}, processes)
    second.send_signal(signal.SIGTERM)
    assert second.wait(240) == 143, processes.log("b")
    at = processes.merges()
    second = processes.start("join", "b")
    wait_until(lambda: processes.islands_since(at) == {"a", "b"}, processes)

    syncer.send_signal(signal.SIGTERM)
    assert syncer.wait(240) == 143, processes.log("syncer")
    rounds = processes.merges() // 2 + 10
    change = (f"--training.rounds={rounds}", "--allow_config_change=training.rounds")
    syncer = processes.start("syncer", "syncer", *change, "--goodbye_seconds=240")
    statuses = [process.wait(240) for process in (syncer, first, second)]
    assert statuses == [0, 0, 0], [processes.log(name) for name in ("syncer", "a", "b")]

    merges = read_merges(tmp_path / "syncer")
    assert [merge["merge"] for merge in merges] == list(range(1, 2 * rounds + 1))
    updates = updates_of(tmp_path / "syncer")
    assert len(updates) == len(set(updates))  # nothing is applied twice
    assert len({process for island, process, *_ in updates if island == "a"}) == 2
    losses = [line["loss"] for line in select(read_metrics(tmp_path / "syncer"), "training")]
    # The loss of a round is of a few examples.
    assert len(losses) == rounds and np.median(losses[-20:]) < 0.8 * losses[0]
    assert all(np.isfinite(x).all() for x in load_params(tmp_path / "syncer").values())
    # The same commands have nothing to do.
    again = [processes.start("syncer", "syncer", *change), processes.start("join", "a")]
    assert [process.wait(240) for process in again] == [0, 0]


def test_strangers_are_refused_in_words(processes: Processes) -> None:
    processes.start("syncer", "syncer")
    stranger = processes.start("join", "c", "--learning_rate=0.5")
    assert stranger.wait(120) == 2
    assert "learning_rate is 0.5, and 0.01 at the syncer" in processes.log("c")
