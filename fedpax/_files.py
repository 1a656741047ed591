"""Files that users bring: texts with a byte-order mark, and files that Git LFS has not fetched."""

import json
from pathlib import Path
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GIT_LFS = b"version https://git-lfs.github.com/spec/"


def check_fetched(path: Path) -> None:
    """Raise a ValueError if Git LFS has left a pointer in the place of a file's content."""
    with path.open("rb") as file:
        if file.read(len(_GIT_LFS)) == _GIT_LFS:
            raise ValueError(
                f"{path} is a Git LFS pointer, expected the content of the file. Run `git lfs "
                f"pull` in {path.parent}, or download the file again."
            )


def read_bytes(path: Path) -> bytes:
    """Read a file that Git LFS has fetched, without the byte-order mark at its start.

    Raises:
        ValueError: the file is a Git LFS pointer.
    """
    check_fetched(path)
    return path.read_bytes().removeprefix(BYTE_ORDER_MARK)


def read_json(path: Path) -> Any:
    """Read a JSON file in UTF-8.

    Raises:
        ValueError: the file is a Git LFS pointer or is not JSON.
    """
    return json.loads(read_bytes(path).decode())
