"""Trackers: what is sent, by which process, and that a server never holds training up."""

import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from small_regression import Regression, regression
from tracker_server import Server, use

from fedpax.checkpoints import load_params
from fedpax.errors import ArgumentError, ConfigurationError, MissingPackageError
from fedpax.run_files.metrics import MetricsWriter, read_metrics
from fedpax.run_files.paths import TRACKER, check_links
from fedpax.training import tracker
from fedpax.training.tracked_runs import metrics_of
from fedpax.training.tracker import Tracker
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

CONFIGURATION = TrainingConfig(rounds=9, evaluate_every=2, checkpoint_every=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECONDS_BETWEEN_SENDS", "SECONDS_BETWEEN_ATTEMPTS"):
        monkeypatch.setattr(tracker, name, 0.002)


def track(folder: Path, notes: list[str], name: str | None = "wandb", **options: Any) -> Tracker:
    return Tracker(
        name, folder, exp="mine", configuration=CONFIGURATION, note=notes.append, **options
    )


def write_rounds(folder: Path, first: int, last: int, notes: list[str], **options: Any) -> None:
    losses = np.random.default_rng(0).normal(size=10)
    with (
        track(folder, notes, **options) as sender,
        MetricsWriter(folder, after=first - 1, listener=sender.add) as metrics,
    ):
        metrics.write_sizes(3, 1, "tokens", 8)
        for number in range(first, last + 1):
            metrics.write("training", number, {"loss": losses[number]})
            if number % 2 == 0:
                metrics.write("evaluation", number, {"loss": 2 * losses[number]})
        metrics.sync()
        sender.finished = last == 9


def test_a_later_process_continues_the_tracked_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, notes = use(monkeypatch, Server()), []
    write_rounds(tmp_path, 1, 5, notes)
    sent = read_metrics(tmp_path)
    write_rounds(tmp_path, 4, 9, notes)  # of a checkpoint of round 3: 4 and 5 were sent
    assert server.lines == sent + [line for line in read_metrics(tmp_path) if line["round"] > 5]
    assert len(set(server.runs)) == 1 and len(server.runs) == 2
    assert server.runs[0].startswith(tmp_path.name[:8])
    assert [entry.number for entry in server.entries] == list(range(len(server.entries)))
    assert server.outcomes == ["interrupted", "finished"]
    assert server.configuration["rounds"] == 9
    assert notes == ["metrics at wandb: memory"] * 2


def test_a_run_that_resumes_without_its_tracker_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Server())
    track(tmp_path, notes := [], None)
    assert notes == []
    write_rounds(tmp_path, 1, 3, [])
    track(tmp_path, notes, None, enabled=False)  # not the first process
    assert notes == []
    track(tmp_path, notes, None)
    assert len(notes) == 1 and "--training.tracker=wandb" in notes[0]
    (tmp_path / TRACKER).write_text("damaged")
    track(tmp_path, notes, None)
    assert len(notes) == 1


@hypothesis.given(failures=st.sets(st.integers(0, 12)), cuts=st.sets(st.integers(1, 8)))
@hypothesis.settings(max_examples=8)
def test_each_line_arrives_once_whatever_fails(
    tmp_path_factory: pytest.TempPathFactory, failures: set[int], cuts: set[int]
) -> None:
    folder, notes = tmp_path_factory.mktemp("run"), []
    with pytest.MonkeyPatch.context() as patch:
        server = use(patch, Server([*failures]))
        starts = [1, *(cut + 1 for cut in sorted(cuts))]
        for first, last in zip(starts, [*sorted(cuts), 9], strict=True):
            write_rounds(folder, first, last, notes)
        for _ in range(14):  # the same command, until nothing fails any more
            write_rounds(folder, 10, 9, notes)
    assert server.lines == read_metrics(folder)


def test_rounds_after_a_roll_back_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, notes = use(monkeypatch, Server()), []
    write_rounds(tmp_path, 1, 6, notes)
    with (
        track(tmp_path, notes) as sender,
        MetricsWriter(tmp_path, after=6, listener=sender.add) as metrics,
    ):
        metrics.write("spike", 4, {"spike_round": 6})
    write_rounds(tmp_path, 5, 6, notes)
    rounds = [line["round"] for line in server.lines if line["kind"] == "training"]
    assert rounds == [1, 2, 3, 4, 5, 6, 5, 6]


def test_a_server_that_does_not_answer_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = use(monkeypatch, Server())
    server.answers.clear()
    monkeypatch.setattr(tracker, "SECONDS_AT_END", 0.1)
    notes: list[str] = []
    with track(tmp_path, notes) as sender:
        for number in range(1000):
            sender.add({"kind": "training", "round": number, "loss": 1.0})
    assert not server.runs  # neither the lines nor the end waited for the answer
    server.answers.set()
    assert notes == [
        "wandb has not got all metrics. They are in metrics.jsonl; the same command sends the rest"
    ]


def wait_for_lines(server: Server) -> None:
    deadline = time.monotonic() + 120  # W&B imports for seconds, and longer on a loaded machine
    while not server.lines and time.monotonic() < deadline:
        time.sleep(0.005)


def test_an_unreachable_server_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, notes = use(monkeypatch, Server(range(5))), []
    with track(tmp_path, notes) as sender:
        sender.add({"kind": "training", "round": 1, "loss": 1.0})
        wait_for_lines(server)
    assert len(server.lines) == 1
    assert notes == [
        "wandb gets no metrics yet (ConnectionError: no route to host); the run continues, and "
        "sends them later",
        "metrics at wandb: memory",
        "wandb has got the metrics that waited",
    ]


def test_a_long_outage_leaves_out_the_oldest_lines_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "MOST_LINES", 10)
    monkeypatch.setattr(tracker, "SECONDS_BETWEEN_SENDS", 30.0)  # until the end
    server, notes = use(monkeypatch, Server()), []
    with track(tmp_path, notes) as sender:
        for number in range(1, 16):
            sender.add({"kind": "training", "round": number, "loss": 1.0})
    assert [line["round"] for line in server.lines] == list(range(6, 16))
    assert "5 lines were not sent to wandb, because more than 10 waited" in notes[-1]


def test_no_tracker_sends_nothing(tmp_path: Path) -> None:
    with track(tmp_path, [], name=None) as sender:
        sender.add({"kind": "training", "round": 1, "loss": 1.0})
    with track(tmp_path, [], enabled=False) as sender:
        sender.add({"kind": "training", "round": 1, "loss": 1.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"wandb": 3}',
        '{"wandb": {"id": "../x"}}',
        '{"wandb": {"id": "a", "lines": -1}}',
    ],
)
def test_a_damaged_position_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(ConfigurationError, match="delete it to begin a new run at the tracker"):
        tracker.read_position(tmp_path, "wandb")


def test_positions_of_other_trackers_are_kept(tmp_path: Path) -> None:
    for name, lines in (("wandb", 3), ("mlflow", 5)):
        position = tracker.TrackedPosition("a-1", lines, {"training": 2})
        tracker.write_position(tmp_path, name, position)
    assert tracker.read_position(tmp_path, "wandb").lines == 3
    assert tracker.read_position(tmp_path, "trackio") == tracker.TrackedPosition()


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"tracker=mlflow .* 'fedpax\[mlflow\]'"):
        track(tmp_path, [], name="mlflow")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"tracker": "tensorboard"},
            "expected one of wandb, mlflow, trackio. Set --train",
        ),
        ({"track_checkpoints": True}, "sends checkpoints to no tracker"),
        (
            {
                "track_checkpoints": True,
                "tracker": "wandb",
                "checkpoint_dir": "gs://bucket/folder",
            },
            "expected checkpoints on this machine",
        ),
    ],
)
def test_settings_that_cannot_work_are_errors(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        dataclasses.replace(CONFIGURATION, **settings)


def experiment(tracker: str, rounds: int, **changes: Any) -> Regression:
    base = regression()
    training = dataclasses.replace(base.training, tracker=tracker, rounds=rounds, **changes)
    return dataclasses.replace(base, training=training)


def test_training_sends_metrics_and_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = use(monkeypatch, Server(range(3)))
    add = Tracker.add

    def add_and_wait(self: Tracker, line: Any, kept: bool = False) -> None:
        add(self, line, kept)
        if line["round"] == 3:  # at its end a run tries once more, and leaves the rest
            wait_for_lines(server)

    monkeypatch.setattr(Tracker, "add", add_and_wait)
    assert train(experiment("wandb", 6, track_checkpoints=True), tmp_path, exp="mine").finished
    assert server.lines == read_metrics(tmp_path)
    assert server.checkpoints[-1] == 6 and server.outcomes == ["finished"]
    assert server.configuration["clients"] == regression().clients
    assert not (tmp_path / ".tracked").exists()
    # A finished run has nothing more to send, and neither opens nor changes the tracked run.
    assert train(experiment("wandb", 6), tmp_path, exp="mine").rounds_trained == 0
    assert len(server.runs) == 1 and server.lines == read_metrics(tmp_path)


def wandb_records(folder: Path) -> Iterator[Any]:
    """Read what W&B has written offline: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, size, kind = struct.unpack("<IHB", content[at : at + 7])
            record += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # the record is complete
                yield Record.FromString(record)
                record = b""


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs the extra wandb")
def test_wandb_offline_continues_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracker, "SECONDS_AT_END", 300.0)  # for a loaded machine
    notes: list[str] = []
    write_rounds(tmp_path, 1, 4, notes)
    time.sleep(1.0)  # W&B's folders have the second in their names
    write_rounds(tmp_path, 4, 9, notes)
    deadline = time.monotonic() + 120
    while True:  # W&B's own process writes the last records after the run's end
        records = list(wandb_records(tmp_path))
        kinds = [record.WhichOneof("record_type") for record in records]
        if kinds.count("exit") == 2 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    runs = [record.run for record, kind in zip(records, kinds, strict=True) if kind == "run"]
    assert len(runs) == 2 and {run.run_id for run in runs} == {
        json.loads((tmp_path / TRACKER).read_text())["wandb"]["id"]
    }
    assert {run.display_name for run in runs} == {tmp_path.name}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["rounds"] == 9
    history = [r.history for r, kind in zip(records, kinds, strict=True) if kind == "history"]
    assert [h.step.num for h in history] == list(range(len(history)))
    sent = [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in h.item} for h in history
    ]
    lines = read_metrics(tmp_path)
    assert len(sent) == len(lines)
    for leaf, line in zip(sent, sorted(lines, key=lambda line: line["round"]), strict=True):
        assert metrics_of(line).items() <= leaf.items() and leaf["round"] == line["round"]
    assert f"wandb sync {tmp_path}" in notes[0] and len(notes) == 2
    check_links(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="needs the extra trackio")
def test_trackio_continues_one_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedpax", "train", "--exp=small_regression:regression"]
    command += [f"--job_log_dir={tmp_path / 'run'}", "--training.tracker=trackio"]
    folder = tmp_path / "trackio"
    environment = os.environ | {
        "TRACKIO_DIR": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    for rounds in (4, 8):
        subprocess.run([*command, f"--training.rounds={rounds}"], env=environment, check=True)
    code = (
        "import json, trackio; from trackio.sqlite_storage import SQLiteStorage as S; "
        "run, = trackio.Api().runs('fedpax'); "
        "print(json.dumps([run.name, S.get_logs('fedpax', run.name)]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    name, logs = json.loads(result.stdout.splitlines()[-1])
    position = json.loads((tmp_path / "run" / TRACKER).read_text())["trackio"]
    assert name == position["id"] and position["last"]["training"] == 8
    losses = [(log["step"], log["training/loss"]) for log in logs if "training/loss" in log]
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "training"]
    assert losses == [(line["round"], line["loss"]) for line in lines]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("mlflow") is None or find_spec("flask") is None,
    reason="needs the package mlflow, with its server",
)
def test_a_server_of_mlflow_that_starts_late(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": address,
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-m", "fedpax", "train", "--exp=small_regression:regression"]
    command += [f"--job_log_dir={tmp_path / 'run'}", "--training.tracker=mlflow"]
    # Nothing listens: the run trains to its end.
    first = subprocess.run(
        [*command, "--training.rounds=4"], env=environment, capture_output=True, text=True
    )
    assert first.returncode == 0 and "Finished 4 of 4 rounds" in first.stdout
    assert first.stderr.count("mlflow gets no metrics yet") == 1
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host=127.0.0.1",
            "--workers=1",
            f"--port={address.rpartition(':')[2]}",
            "--backend-store-uri=sqlite:///mlflow.db",
        ],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        page, deadline = b"", time.monotonic() + 300  # it imports for 95 s on a loaded machine
        while not page and time.monotonic() < deadline:
            try:
                page = urllib.request.urlopen(address, timeout=5).read()
            except OSError:
                time.sleep(0.5)
        assert b"<title>MLflow</title>" in page
        more = ["--training.rounds=8", "--training.track_checkpoints=True"]
        for _ in range(4):  # on a loaded machine the server answers after the end of the run
            again = subprocess.run(
                [*command, *more], env=environment, capture_output=True, text=True, check=True
            )
            if "the same command sends the rest" not in again.stderr:
                break
        from mlflow import MlflowClient

        client = MlflowClient(address)
        (experiment_,) = client.search_experiments(filter_string="name = 'fedpax'")
        (run,) = client.search_runs([experiment_.experiment_id])
        assert run.info.run_name == "run" and run.info.status == "FINISHED"
        assert run.data.params["training.rounds"] == "8"  # the first process reached no server
        sent = client.get_metric_history(run.info.run_id, "training/loss")
        lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "training"]
        assert [(m.step, m.value) for m in sent] == [(e["round"], e["loss"]) for e in lines]
        subprocess.run([*command, "--training.rounds=9"], env=environment, check=True)
        (run,) = client.search_runs([experiment_.experiment_id])
        assert run.data.tags["changed.training.rounds"] == "9"
        folder = client.download_artifacts(run.info.run_id, "", str(tmp_path))
        assert (Path(folder) / "checkpoints" / "8").is_dir() and load_params(folder)
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # it takes long to stop, and nothing is kept
        server.wait()
