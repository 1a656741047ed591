"""Paths that users write."""

from pathlib import Path

from fedpax.user_paths import expand_home


def test_the_home_folder_is_expanded() -> None:
    assert expand_home("~/data") == Path.home() / "data"
