"""Files that others may have made."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.deploy import round_program
from fedpax.deploy.flower.app import write_state
from fedpax.deploy.nodes.kept_state import KeptState
from fedpax.errors import ArgumentError
from fedpax.files import (
    UnusableFileError,
    check_fetched,
    lock_file,
    read_file,
    replace_file,
    replacing,
)


def test_a_file_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"text")
    assert read_file(path) == b"text"
    with pytest.raises(UnusableFileError, match="it has 4 bytes, expected at most 3"):
        read_file(path, max_bytes=3)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ArgumentError, match="a is a Git LFS pointer, expected the content of"):
        check_fetched(path)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("old")
    (tmp_path / "link").symlink_to("theirs")
    replace_file(tmp_path / "link", b"new")
    assert ((tmp_path / "theirs").read_text(), (tmp_path / "link").read_text()) == ("old", "new")


def test_content_is_on_the_disk_before_it_replaces_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    """A crash of the machine would leave an empty file, which stands in the place of the old."""
    calls: list[str] = []
    noted = {name: getattr(of, name) for of, name in ((os, "fsync"), (Path, "replace"))}

    def note(name: str, *args: Any) -> Any:
        calls.append(name)
        return noted[name](*args)

    monkeypatch.setattr(os, "fsync", lambda *args: note("fsync", *args))
    monkeypatch.setattr(Path, "replace", lambda *args: note("replace", *args))
    monkeypatch.setattr(round_program, "pack_experiment", lambda *_: "program")
    monkeypatch.setattr(round_program, "to_json", lambda _: {})
    experiment: Any = type("Built", (), {"build": lambda _: None})()
    values = {"w": np.random.default_rng(0).normal(size=4)}
    for write in (
        lambda: write_state(tmp_path / "state.npz", values),
        lambda: KeptState(tmp_path).write("1.0", values),
        lambda: round_program.program_file(experiment, tmp_path),
    ):
        calls.clear()
        write()
        assert calls == ["fsync", "replace"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(ArgumentError), replacing(tmp_path / "a") as file:
        file.write(b"half of the new content")
        raise ArgumentError("stopped")
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_lock_is_held_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("wb") as first, path.open("rb") as second:
        assert lock_file(first, wait=True) is True
        assert lock_file(second) is False
        assert lock_file(second, shared=True) is False
        first.close()
        assert lock_file(second, shared=True) is True
        with path.open("rb") as third:
            assert lock_file(third, shared=True) is True
            assert lock_file(third) is False
