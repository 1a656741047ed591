"""Files that others may have made."""

from pathlib import Path

import pytest

from fedpax.errors import ArgumentError
from fedpax.files import UnusableFileError, check_fetched, read_file, replace_file


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
