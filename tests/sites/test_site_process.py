"""What the processes of a run over sites open alike."""

import dataclasses
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("grpc")

from fedpax.errors import ConfigurationError
from fedpax.experiments.catalog import find_experiment
from fedpax.sites import site_process
from fedpax.sites.site_process import end_serving, locked_folder, patience
from fedpax.transport.calls import DisconnectedError, WaitingError


def test_waiting_is_noted_at_most_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, now = list[str](), 100.0
    monkeypatch.setattr(site_process.time, "monotonic", lambda: now)
    note = patience(SimpleNamespace(note=notes.append))
    for seconds, error in (
        (0.0, DisconnectedError("oslo:7000")),
        (9.0, DisconnectedError("lost")),
        (2.0, WaitingError("all shards are taken")),
    ):
        now += seconds
        note(error)
    assert notes == ["waiting for the syncer at oslo:7000", "waiting: all shards are taken"]


@pytest.mark.parametrize("finished", [True, False])
def test_a_finished_run_was_not_stopped_by_its_signal(finished: bool) -> None:
    tracker, preemption = SimpleNamespace(finished=None), SimpleNamespace(signal=signal.SIGTERM)
    files = SimpleNamespace(tracker=tracker)
    result = end_serving(files, preemption, 7, finished)
    assert result == (7, finished, None if finished else signal.SIGTERM)
    assert tracker.finished is finished


def test_the_number_of_rounds_is_the_syncers_alone(tmp_path: Path) -> None:
    experiment = find_experiment("fedavg_digits")()
    training = dataclasses.replace(experiment.training, rounds=experiment.training.rounds + 1)
    with locked_folder(experiment, tmp_path, "join", "", ()) as folder:
        longer = dataclasses.replace(experiment, training=training)
        site_process.write_configuration(folder, longer, "")
        with pytest.raises(ConfigurationError, match="in use by another process"):
            locked_folder(experiment, tmp_path, "join", "", ()).__enter__()
    with locked_folder(experiment, tmp_path, "join", "", ()):
        pass
    with pytest.raises(ConfigurationError, match=r"training\.rounds"):
        locked_folder(experiment, tmp_path, "syncer", "", ()).__enter__()
