"""Runs whose checkpoints are in another folder, which one run at a time may use."""

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from small_regression import shared_compilation, single_client

from fedpax.checkpoints.checkpoint import LostCheckpointDirError
from fedpax.checkpoints.checkpoint_files import find_damage, write_checksums
from fedpax.checkpoints.saved_state import load_params
from fedpax.commands.compare import compare
from fedpax.errors import ConfigurationError
from fedpax.reports.run_report import report_run
from fedpax.run_files.metrics import TIMINGS, read_metrics
from fedpax.run_files.paths import (
    complete_rounds,
    refuse_checkpoint_dir,
    resolve_folder,
    resolve_job_log_dir,
)
from fedpax.training import folder_owners
from fedpax.training.folder_owners import OWNER, CheckpointDir, is_owned
from fedpax.training.trainer import train


def experiment(rounds: int, folder: Path | str | None, **training: Any) -> Any:
    base = single_client()
    where = None if folder is None else str(folder)
    changed = dataclasses.replace(
        base.training, rounds=rounds, checkpoint_every=2, checkpoint_dir=where, **training
    )
    return dataclasses.replace(base, training=changed)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines without timings, and without the evaluation after a round 2 that is last."""
    result = [{k: v for k, v in x.items() if k not in TIMINGS} for x in read_metrics(folder)]
    return [line for line in result if (line["kind"], line["round"]) != ("evaluation", 2)]


def test_a_machine_with_an_empty_folder_resumes_bitwise(tmp_path: Path) -> None:
    first, second, plain = (tmp_path / name for name in ("first", "second", "plain"))
    saved = tmp_path / "saved"
    with shared_compilation():
        train(experiment(2, saved), first)
        later = experiment(4, saved, export_every=4)
        changed = ["training.export_every"]
        assert train(later, second, allow_config_change=changed).rounds_trained == 2
        train(experiment(4, None), plain)
    assert not (first / "checkpoints").exists() and not any((second / "exports").iterdir())
    assert report_run(first).state == report_run(saved).state == "finished"

    assert complete_rounds(saved / "checkpoints") == complete_rounds(plain / "checkpoints")
    assert {path.name for path in (saved / "exports").iterdir()} == {"4"}
    assert lines(second) == lines(saved) == lines(plain)
    loaded, expected = load_params(saved), load_params(plain)
    assert {k: v.tobytes() for k, v in loaded.items()} == {
        k: v.tobytes() for k, v in expected.items()
    }
    # TensorBoard shows the rounds of the first machine too.
    (events,) = (second / "tensorboard").iterdir()
    assert events.read_bytes().count(b"training/largest") == 4


def test_checkpoints_in_the_runs_folder_are_not_left_behind(tmp_path: Path) -> None:
    write = tmp_path / "run" / "checkpoints" / "3"
    write.mkdir(parents=True)
    write_checksums(write)
    with pytest.raises(ConfigurationError, match=r"has checkpoints.*Move .* to .*saved/ch"):
        train(experiment(4, tmp_path / "saved"), tmp_path / "run")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times of the protocol."""
    for name, seconds in (("BETWEEN_BEATS", 0.05), ("OF_SILENCE", 0.5), ("BETWEEN_LOOKS", 0.02)):
        monkeypatch.setattr(folder_owners, f"SECONDS_{name}", seconds)


def test_a_second_run_is_refused(tmp_path: Path, quick: None) -> None:
    with CheckpointDir(tmp_path / "saved", tmp_path / "a"):
        assert is_owned(tmp_path / "saved")
        words = "in use by another run .*another --training.checkpoint_dir"
        with pytest.raises(ConfigurationError, match=words):
            CheckpointDir(tmp_path / "saved", tmp_path / "b").__enter__()
    assert not is_owned(tmp_path / "saved")
    started = time.monotonic()
    with CheckpointDir(tmp_path / "saved", tmp_path / "b"):  # released: no wait
        assert time.monotonic() - started < 0.4


def test_a_silent_run_loses_the_folder_and_completes_no_checkpoint(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CheckpointDir, "_beat", lambda self: self._done.wait())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("a's\n")
    with CheckpointDir(tmp_path / "saved", tmp_path / "a") as first:
        first.before_complete()
        with CheckpointDir(tmp_path / "saved", tmp_path / "b"):
            assert "Waiting 0.5 s to see whether it still trains" in capsys.readouterr().err
            assert (tmp_path / "b" / "metrics.jsonl").read_text() == "a's\n"
            with pytest.raises(LostCheckpointDirError, match=r"belongs to .*/b now"):
                first.before_complete()
        assert json.loads((tmp_path / "saved" / OWNER).read_text())["free"]


def test_the_same_folder_resumes_at_once_with_its_own_files(tmp_path: Path, quick: None) -> None:
    killed = CheckpointDir(tmp_path / "saved", tmp_path / "a").__enter__()
    killed._done.set()
    (tmp_path / "a" / "metrics.jsonl").write_text("old\n")
    killed.before_complete()
    (tmp_path / "a" / "metrics.jsonl").write_text("new\n")
    started = time.monotonic()
    with CheckpointDir(tmp_path / "saved", tmp_path / "a"):
        assert time.monotonic() - started < 0.4
        assert (tmp_path / "a" / "metrics.jsonl").read_text() == "new\n"


def test_checksums_of_a_copy_from_a_bucket_are_compared(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"123456789")
    # The CRC-32C of these digits is 0xE3069283 (RFC 3720, B.4 names the polynomial).
    (tmp_path / "checksums.json").write_text('{"data": [9, "4waSgw=="]}')
    assert find_damage(tmp_path) is None
    (tmp_path / "data").write_bytes(b"12345678")
    assert find_damage(tmp_path) == "data has 8 bytes instead of 9"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/run", "expected gs://BUCKET/FOLDER .*Mount a bucket of another store"),
        ("gs://bucket", "expected gs://BUCKET/FOLDER"),
        ("gs://Bucket/run", "names the bucket 'Bucket', expected a name of 3 to 63 .*lower-case"),
        ("gs://bucket/run", r"needs the package gcsfs.*pip install 'fedpax\[gcs\]'"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(
    url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=words):
        resolve_folder(url)
    with pytest.raises(ConfigurationError, match=words):
        train(experiment(1, url), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_url_as_the_runs_folder_names_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"--training\.checkpoint_dir=gs://bucket/run"):
        resolve_job_log_dir("gs://bucket/run")


def test_commands_with_several_folders_refuse_one_for_checkpoints(tmp_path: Path) -> None:
    refuse_checkpoint_dir(None, "join")
    with pytest.raises(ConfigurationError, match="`fedpax compare` keeps checkpoints in --job_log"):
        compare(
            [
                "--exp=diloco_text,pretrain_text",
                f"--job_log_dir={tmp_path}",
                "--training.checkpoint_dir=gs://bucket/run",
            ]
        )
