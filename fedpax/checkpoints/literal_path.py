"""Paths for Orbax whose folders may have the characters of patterns."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from etils import epath

_LocalPath: Any = type(epath.Path("/"))


class _LiteralPath(_LocalPath):
    """A path of a file system whose `glob` takes the path itself as it is written."""

    def glob(self, pattern: str) -> Iterator["_LiteralPath"]:
        """Yield the files and folders that match a pattern below this folder."""
        for name in glob.glob(pattern, root_dir=os.fspath(self)):
            yield self / name


def literal_path(folder: Path) -> Path:
    """Return a path under which Orbax finds its files.

    Orbax lists the files of a checkpoint by patterns that begin with its folder. In a folder such
    as `runs[1]` it would find none, and leave a part of the checkpoint out.

    Args:
        folder: a folder, or a folder in a bucket.

    Returns:
        The same path.

    Example:
        >>> print(literal_path(Path("/data/runs[1]")))
        /data/runs[1]
    """
    if not isinstance(folder, Path) or glob.escape(str(folder)) == str(folder):
        return folder
    return cast(Path, _LiteralPath(folder))
