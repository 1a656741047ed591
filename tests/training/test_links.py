"""Tests of runs in a folder with links that lead to a user's files: none of these files changes."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from small_regression import single_client

from fedpax.elastic.host_copies import HostCopies
from fedpax.errors import ConfigurationError
from fedpax.files import open_unlinked
from fedpax.islands.syncer.logs import append_merge
from fedpax.islands.syncer.syncer_store import Journal
from fedpax.main import main
from fedpax.pictures import save_picture
from fedpax.run_files.metrics import read_metrics
from fedpax.run_files.paths import FOLDERS
from fedpax.training.folder_owners import JobDirLock, is_in_use
from fedpax.training.trainer import train

DRAFTS = [f".{name}.draft" for name in ("config.json", "metrics.jsonl", "goodput.json")]
ONE_ROUND = dataclasses.replace(
    single_client(), training=dataclasses.replace(single_client().training, rounds=1)
)
TEXT = "a file of the user"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Make a file of the user, which must not change."""
    path = tmp_path / "file"
    path.write_text(TEXT)
    yield path
    assert path.read_text() == TEXT


def test_links_at_drafts_and_at_files_that_are_replaced_are_not_followed(
    file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (*DRAFTS, "metrics.jsonl", "goodput.json"):
        (folder / name).symlink_to(file)
    os.link(file, folder / ".lock")  # a name of the user's file
    assert train(ONE_ROUND, folder).finished
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert {line["kind"] for line in read_metrics(folder)} == {"run", "training", "evaluation"}


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_lock_that_is_no_regular_file_is_told(file: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / ".lock")
    else:
        (folder / ".lock").symlink_to(file if kind == "link" else tmp_path / "new")
    assert not is_in_use(folder)
    with pytest.raises(ConfigurationError, match=r"cannot hold a run \(it is a (link|pipe)"):
        JobDirLock(folder)
    assert not (tmp_path / "new").exists()


def test_two_names_of_a_lock_do_not_let_two_processes_train(tmp_path: Path) -> None:
    with JobDirLock(tmp_path / "run"):
        os.link(tmp_path / "run" / ".lock", tmp_path / "copy")
        with pytest.raises(ConfigurationError, match="is in use by another process"):
            JobDirLock(tmp_path / "run")


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("inside", [False, True])
def test_links_in_place_of_the_folders_of_a_run_are_refused(
    tmp_path: Path, name: str, inside: bool
) -> None:
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    (theirs / "2").mkdir(parents=True)
    (theirs / "2" / "file").write_text(TEXT)
    link = folder / name / "2" if inside else folder / name
    link.parent.mkdir(parents=True)
    link.symlink_to(theirs / "2" if inside else theirs)
    with pytest.raises(ConfigurationError, match=f"{link} is a link to {theirs}.*Remove the link"):
        train(ONE_ROUND, folder)
    assert [path.name for path in theirs.rglob("*")] == ["2", "file"]
    assert not (folder / "config.json").exists() and not (folder / ".lock").exists()


def test_links_in_a_folder_of_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "saved" / "checkpoints").symlink_to(tmp_path / "theirs")
    training = dataclasses.replace(ONE_ROUND.training, checkpoint_dir=str(tmp_path / "saved"))
    with pytest.raises(ConfigurationError, match=r"checkpoints is a link.*--training.checkpoint_d"):
        train(dataclasses.replace(ONE_ROUND, training=training), tmp_path / "run")
    assert not any((tmp_path / "theirs").iterdir())


def test_a_link_in_place_of_the_folder_of_a_compared_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "pretrain_text").symlink_to(tmp_path / "theirs")
    assert main(["compare", "--exp=pretrain_text", f"--job_log_dir={tmp_path}"]) == 2
    assert f"pretrain_text is a link to {tmp_path / 'theirs'}" in capsys.readouterr().err
    assert not any((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("merges.jsonl", lambda path: append_merge(path.parent, {"merge": 1})),
        ("round_0.journal", Journal),
        ("hang.txt", lambda path: open_unlinked(path, os.O_WRONLY | os.O_APPEND)),
    ],
)
def test_files_that_are_changed_in_place_are_not_links(
    file: Path,
    tmp_path: Path,
    plant: Callable[[Path, Path], None],
    name: str,
    write: Callable[[Path], object],
) -> None:
    path = tmp_path / name
    plant(path, file)
    with pytest.raises(OSError, match=r"it is a link, expected|it has 2 names"):
        write(path)


def test_a_picture_replaces_a_link(file: Path, tmp_path: Path) -> None:
    for name in ("comparison.png", ".comparison.png.draft"):
        (tmp_path / name).symlink_to(file)
    save_picture(Figure(), tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_copies_are_written_to_a_folder_of_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "copies").symlink_to("theirs")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("copies", "open"):
        copies = HostCopies(tmp_path / name, "job", keep=2)
        with pytest.raises(PermissionError, match="is not a folder of this user alone"):
            copies.save(1, {}, {})
    assert not any((tmp_path / "theirs").iterdir())
