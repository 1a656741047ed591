"""check_shards: shards such as train-00000-of-00003.parquet, of which none may be missing."""

import logging
import re
from collections.abc import Sequence

from fedpax.errors import ArgumentError
from fedpax.user_files.finding import DataFile

_SHARD = re.compile(r"((?:.*\D)?)(\d{5})(-of-(\d{5}))(?!\d)(.*)", re.DOTALL)


def is_numbered(name: str) -> bool:
    """Return whether a file's name is that of a shard.

    Example:
        >>> is_numbered("train-00000-of-00003"), is_numbered("north")
        (True, False)
    """
    return _SHARD.fullmatch(name) is not None


def check_shards(files: Sequence[DataFile], patterns: Sequence[str]) -> None:
    """Raise an error for missing shards that no pattern leaves out, or log those of a list.

    Args:
        files: the files that are read.
        patterns: the paths and patterns that named them. Empty: a folder.
    """
    found: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.path):
            found.setdefault((match[1], match[3], match[5]), set()).add(int(match[2]))
    for (start, of, end), numbers in found.items():
        total = int(of[-5:])
        missing = sorted({*range(total)} - numbers)
        if not missing or (patterns and all(map(_chooses, patterns))):
            continue
        name = f"{start}{missing[0]:05d}{of}{end}"
        told = f"{name} is missing: {len(numbers)} of {total} shards are there"
        if patterns and not any(re.search(r"[*?{]", pattern) for pattern in patterns):
            if len(patterns) > 1:
                logging.getLogger(__name__).warning("%s.", told)
            continue
        raise ArgumentError(
            f"{told}, expected all. Fetch it, or name the numbers to read, such as "
            f"'{start}{min(numbers):05d}*'."
        )


def _chooses(pattern: str) -> bool:
    """Return whether a pattern states numbers of shards, such as data-0001*-of-00100.csv."""
    name = re.split(r"[/\\]", pattern)[-1]
    return re.search(r"\d[*?]|\[", name) is not None
