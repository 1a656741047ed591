"""A syncer and two islands as processes over loopback, of which each is killed once."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedpax.sites.merge_log import read_merges
from fedpax.training.checkpoint import load_params
from fedpax.training.metrics import read_metrics, select

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow
pytest.importorskip("grpc")


class Processes:
    """Commands of `fedpax` in processes of their own; all are ended in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, command: str, name: str, *more: str) -> subprocess.Popen:
        where = f"--listen={self.address}" if command == "syncer" else f"--syncer={self.address}"
        options = [
            where,
            "--exp=small_sites:sites_regression",
            f"--job_log_dir={self.folder / name}",
        ]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedpax.main", command, *options, *more],
                cwd=HERE,
                stdout=log,
                stderr=log,
                env=environment | {"JAX_NUM_CPU_DEVICES": "1"},
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def merges(self) -> int:
        path = self.folder / "syncer" / "syncer" / "state.json"
        return json.loads(path.read_text())["merges"] if path.exists() else 0


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], processes: Processes, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "".join(processes.log(path.stem) for path in processes.folder.glob("*.log"))
        assert time.monotonic() < deadline, logs[-4000:]
        time.sleep(0.02)


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
    updates = [
        (update["island"], update["incarnation"], merge["fragment"], update["sequence"])
        for merge in merges
        for update in merge["updates"]
    ]
    assert len(updates) == len(set(updates))  # nothing is applied twice
    assert {island for island, *_ in updates} == {"a", "b"}
    assert len({process for island, process, *_ in updates if island == "a"}) == 2
    losses = [line["loss"] for line in select(read_metrics(tmp_path / "syncer"), "training")]
    assert len(losses) == 60 and losses[-1] < 0.5 * losses[0]
    assert all(np.isfinite(x).all() for x in load_params(tmp_path / "syncer").values())
    # The same commands have nothing to do.
    again = [processes.start("syncer", "syncer"), processes.start("join", "a")]
    assert [process.wait(120) for process in again] == [0, 0]


def test_strangers_are_refused_in_words(processes: Processes) -> None:
    processes.start("syncer", "syncer")
    stranger = processes.start("join", "c", "--learning_rate=0.5")
    assert stranger.wait(120) == 2
    assert "learning_rate is 0.5, and 0.01 at the syncer" in processes.log("c")
