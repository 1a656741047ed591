"""A syncer and its islands send their metrics to a tracker, each as a run of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_processes import Processes

from fedpax.run_files.metrics import read_metrics

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")
pytest.importorskip("wandb")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    sites = Processes(tmp_path)
    yield sites
    sites.end()


def test_each_process_has_a_tracked_run(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = ("--training.tracker=wandb", "--training.rounds=6")
    started = [processes.start("syncer", "syncer", *flags)]
    started += [processes.start("join", name, *flags) for name in "ab"]
    statuses = [process.wait(240) for process in started]
    assert statuses == [0, 0, 0], [processes.log(name) for name in ("syncer", "a", "b")]
    ids = set()
    for name in ("syncer", "a", "b"):
        position = json.loads((tmp_path / name / "tracker.json").read_text())["wandb"]
        lines = [line for line in read_metrics(tmp_path / name) if line["kind"] == "training"]
        assert lines and position["last"]["training"] == lines[-1]["round"]
        ids.add(position["id"])
    assert len(ids) == 3
