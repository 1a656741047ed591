"""Files that users bring: paths with patterns, byte-order marks, and pointers of Git LFS."""

import glob
import json
from collections.abc import Callable
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


def find_paths(pattern: str | Path) -> list[Path]:
    """Return the paths that match a pattern, in order.

    A part of the pattern that exists as it is written stands for itself, so a folder can be named
    `corpus[1]`.

    Args:
        pattern: a path, whose parts may have the patterns of `glob`, such as `train-*`.
    """
    whole = Path(pattern).expanduser()
    found = [Path(whole.anchor)]
    for part in whole.parts[bool(whole.anchor) :]:
        found = [path for folder in found for path in _match(folder, part)]
    return sorted(found)


def _match(folder: Path, part: str) -> list[Path]:
    if (folder / part).exists():
        return [folder / part]
    return [folder / name for name in glob.glob(part, root_dir=folder)]


def split_list(text: str, exists: Callable[[str], bool]) -> list[str]:
    """Split a list at its commas, but for the commas in a name that exists.

    Args:
        text: names, separated by commas.
        exists: returns whether a name with commas exists.

    Example:
        >>> split_list("runs/a,b,runs/c", {"runs/a,b"}.__contains__)
        ['runs/a,b', 'runs/c']
    """
    parts, names = text.split(","), []
    while parts:
        joined = (n for n in range(len(parts), 1, -1) if exists(",".join(parts[:n])))
        count = next(joined, 1)
        names.append(",".join(parts[:count]))
        parts = parts[count:]
    return [name for name in names if name]
