"""Runs in a folder of a mounted object store, which renames no folders."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_regression import single_client

from fedpax.checkpoints import checkpoint, orbax_files
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.orbax_files import delete_folder, is_object_store, rename_folder
from fedpax.checkpoints.saved_state import load_params
from fedpax.run_files.metrics import TIMINGS, read_metrics
from fedpax.run_files.paths import complete_rounds
from fedpax.training.trainer import train


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is listed as a bucket, and in which only files can be renamed."""
    folder = tmp_path / "my bucket"
    folder.mkdir()
    listing = tmp_path / "mounts"
    lines = [
        "/dev/root / ext4 rw 0 0",
        rf"my_bucket {tmp_path}/my\040bucket fuse.gcsfuse rw,user_id=0 0 0",
        f"/dev/disk {folder}/local ext4 rw 0 0".replace(" bucket", r"\040bucket"),
    ]
    listing.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(orbax_files, "MOUNTS", listing)

    def files_only(rename: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, **options: Any) -> None:
            if folder in Path(source).parents and Path(source).is_dir():
                raise OSError(f"too many open files: {source}")
            rename(source, target, **options)

        return renamed

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, files_only(getattr(os, name)))
    return folder


def test_a_folder_in_a_bucket_is_recognized(bucket: Path, tmp_path: Path) -> None:
    assert is_object_store(bucket) and is_object_store(bucket / "not" / "there")
    assert not is_object_store(bucket / "local" / "run")
    assert not is_object_store(tmp_path)


def test_a_system_without_a_list_of_mounts_has_no_buckets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(orbax_files, "MOUNTS", tmp_path / "missing")
    assert not is_object_store(tmp_path)


@pytest.mark.slow
def test_a_run_in_a_bucket_is_killed_and_ends_as_in_a_folder(bucket: Path, tmp_path: Path) -> None:
    base = single_client()

    def experiment(rounds: int) -> Any:
        training = dataclasses.replace(
            base.training, rounds=rounds, checkpoint_every=2, keep_checkpoints=2, export_every=4
        )
        return dataclasses.replace(base, training=training)

    train(experiment(6), tmp_path / "plain")
    run = bucket / "run"
    assert train(experiment(3), run).finished
    assert complete_rounds(run / "checkpoints") == [2, 3]
    # A kill while a checkpoint is written in place, and while a model is moved.
    shutil.copytree(run / "checkpoints" / "3", run / "checkpoints" / "5")
    for name in ("checksums.json", "commit_success.txt"):
        (run / "checkpoints" / "5" / name).unlink()
    assert complete_rounds(run / "checkpoints") == [2, 3]
    (run / "exports" / "3" / "config.json").unlink()
    assert train(experiment(3), run).rounds_trained == 0
    assert (run / "exports" / "3" / "config.json").is_file()
    assert train(experiment(6), run).finished
    assert complete_rounds(run / "checkpoints") == [4, 6]
    assert {path.name for path in (run / "exports").iterdir()} == {"3", "4", "6"}
    plain, loaded = (load_params(folder) for folder in (tmp_path / "plain", run))
    assert {k: v.tobytes() for k, v in plain.items()} == {k: v.tobytes() for k, v in loaded.items()}

    def lines(folder: Path) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in line.items() if k not in TIMINGS}
            for line in read_metrics(folder)
            if line["kind"] == "training"
        ]

    assert lines(run) == lines(tmp_path / "plain")


@pytest.mark.slow
def test_checkpoints_that_were_copied_into_a_bucket_are_used(bucket: Path, tmp_path: Path) -> None:
    base = single_client()
    training = dataclasses.replace(base.training, rounds=2, checkpoint_every=2)
    train(dataclasses.replace(base, training=training), tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", bucket / "run")
    training = dataclasses.replace(training, rounds=4)
    assert train(dataclasses.replace(base, training=training), bucket / "run").rounds_trained == 2
    shutil.copytree(bucket / "run", tmp_path / "back")
    assert complete_rounds(tmp_path / "back" / "checkpoints") == [2, 4]
    for number in (2, 4):
        np.testing.assert_array_equal(
            load_params(tmp_path / "back", number)["out"],
            load_params(bucket / "run", number)["out"],
        )


def test_a_folder_of_which_a_part_is_deleted_does_not_count(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", kill)
    for parent in (bucket, tmp_path):
        folder = parent / "4"
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (folder / name).touch()
        with pytest.raises(KeyboardInterrupt):
            delete_folder(folder, last="config.json")
        assert not (folder / "config.json").exists()
    assert [path.name for path in tmp_path.glob(".*.draft")] == [".4.deleted.draft"]


def test_files_are_moved_one_by_one_and_the_last_one_last(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = bucket / "draft", bucket / "model"
    for name in ("a/1.safetensors", "a/b/2", "config.json", "tokenizer.json"):
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        (draft / name).write_text(name)
    moved: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: moved.append(Path(a).name) or rename(a, b))
    rename_folder(draft, target, last="config.json")
    assert moved[-1] == "config.json" and len(moved) == 4
    assert (target / "a" / "b" / "2").read_text() == "a/b/2"
    assert not draft.exists()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_save_of_the_last_round_is_tried_again(
    bucket: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """The failed save leaves files under the round's name, in which Orbax saves nothing more."""
    monkeypatch.setattr(checkpoint, "is_remote", lambda folder: True)
    errors = [OSError("Malformed StorageGeneration")] * failures

    def fail_first() -> None:
        if errors:
            raise errors.pop()

    rng = np.random.default_rng(0)
    states = [{"w": rng.normal(size=(3, 2)).astype(np.float32)} for _ in range(2)]
    with Checkpoints(bucket / "run", keep=2, before_complete=fail_first) as checkpoints:
        saved = []
        for _ in range(failures + 1):
            checkpoints.save(3, states[0], {}, {})
            saved.append(checkpoints.is_saved())
        assert saved == [False] * failures + [True]
        checkpoints.save(6, states[1], {}, {})
        checkpoints.wait()
        assert complete_rounds(bucket / "run" / "checkpoints") == [3, 6]
        np.testing.assert_array_equal(checkpoints.restore_state(states[0])["w"], states[1]["w"])
