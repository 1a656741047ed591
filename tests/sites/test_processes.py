"""A syncer and two islands as processes over loopback, of which each is killed once."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from site_processes import Processes, updates_of, wait_until

from fedpax.sites.merge_log import read_merges
from fedpax.training.checkpoint import load_params
from fedpax.training.metrics import read_metrics, select

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.end()


def test_every_process_is_killed_once(processes: Processes, tmp_path: Path) -> None:
    syncer = processes.start("syncer", "syncer")
    first, second = (processes.start("join", name) for name in ("a", "b"))
    wait_until(lambda: processes.merges() > 10, processes)
    first.kill()
    first.wait()
    at = processes.merges()
    wait_until(lambda: processes.merges() > at + 10, processes)  # b trains on
    first = processes.start("join", "a")
    wait_until(lambda: "resuming after its round" in processes.log("a"), processes)
    wait_until(lambda: processes.merges() > at + 30, processes)
    syncer.kill()
    syncer.wait()
    lines = len(read_metrics(tmp_path / "b"))
    wait_until(lambda: len(read_metrics(tmp_path / "b")) > lines + 3, processes)  # b trains on
    syncer = processes.start("syncer", "syncer")
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 143, processes.log("b")
    second = processes.start("join", "b")
    statuses = [process.wait(240) for process in (syncer, first, second)]
    assert statuses == [0, 0, 0], [processes.log(name) for name in ("syncer", "a", "b")]

    merges = read_merges(tmp_path / "syncer")
    assert [merge["merge"] for merge in merges] == list(range(1, 121))
    updates = updates_of(tmp_path / "syncer")
    assert len(updates) == len(set(updates))  # nothing is applied twice
    assert {island for island, *_ in updates} == {"a", "b"}
    assert len({process for island, process, *_ in updates if island == "a"}) == 2
    losses = [line["loss"] for line in select(read_metrics(tmp_path / "syncer"), "training")]
    # The loss of a round is that of a few examples.
    assert len(losses) == 60 and np.median(losses[-20:]) < 0.8 * losses[0]
    assert all(np.isfinite(x).all() for x in load_params(tmp_path / "syncer").values())
    # The same commands have nothing to do.
    again = [processes.start("syncer", "syncer"), processes.start("join", "a")]
    assert [process.wait(240) for process in again] == [0, 0]


def test_strangers_are_refused_in_words(processes: Processes) -> None:
    processes.start("syncer", "syncer")
    stranger = processes.start("join", "c", "--learning_rate=0.5")
    assert stranger.wait(120) == 2
    assert "learning_rate is 0.5, and 0.01 at the syncer" in processes.log("c")
