"""Estimate the memory that files take as columns; raise if the machine has less."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from fedpax.errors import ArgumentError
from fedpax.user_files.finding import DataFile, is_url
from fedpax.user_files.formats import find_function, format_of

_EXPANSION = 4  # bytes of a column for one byte of a compressed file
_COPIES = 2  # sorting holds the rows before and after


def estimate_bytes(groups: Sequence[Sequence[DataFile]]) -> int:
    """Estimate the bytes of the columns of local files."""
    return sum(_estimate(file) for group in groups for file in group if not is_url(file.path))


def _estimate(file: DataFile) -> int:
    form = format_of(file)
    if form.size is not None:
        with contextlib.suppress(Exception):  # damaged: told when it is read
            size: int = find_function(form.size)(file)
            return size
    expansion = _EXPANSION if file.is_compressed or form.is_compressed else 1
    return os.path.getsize(file.path) * expansion


def check_memory(name: str, groups: Sequence[Sequence[DataFile]]) -> None:
    """Raise an error for files that would exceed the memory that is available."""
    read = [[file for file in group if not format_of(file).is_mapped] for group in groups]
    needed, available = _COPIES * estimate_bytes(read), _available_bytes()
    if available is not None and needed > available:
        raise ArgumentError(
            f"{name} takes about {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are "
            "available. Read some columns with columns=, or sort the files on the disk once: "
            f"fedpax prepare '{name}' --out=FOLDER, and load the folder."
        )


def check_copy(name: str, num_bytes: int) -> None:
    """Raise if a copy of a memory-mapped table would exceed the available memory."""
    available = _available_bytes()
    if available is not None and num_bytes > available:
        raise ArgumentError(
            f"To sort {name} by the clients of a partition takes {num_bytes / 1e9:.1f} GB of "
            f"memory, and {available / 1e9:.1f} GB are available. Read some columns with columns=, "
            "train with fedavg_table, which does not sort, or leave partition out and pass "
            "the indices of fedpax.data.partition_dirichlet(source.column(label), n) to "
            "cohort_rounds."
        )


def _available_bytes() -> int | None:
    """Return the memory that Linux can give, or None on other systems."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
