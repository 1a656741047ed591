"""Checkpoints that hold a part of client stores, and the checkpoints that hold the other rows."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

from fedpax.errors import ArgumentError
from fedpax.files import read_json
from fedpax.run_files.paths import CHECKSUMS

PARENT = "parent.json"
"""The file of a checkpoint that has only the rows that changed since another checkpoint."""


class Parent(NamedTuple):
    """The checkpoint that a checkpoint's rows of client stores complete."""

    round: int
    position: int  # number of checkpoints since the one that has all rows, with this one
    stores: list[list[str]]  # the path of each client store in the state
    # `identity_of` the parent, set when the checkpoint is written: another checkpoint of the same
    # round has other rows
    identity: int = 0

    @classmethod
    def read(cls, checkpoint: Path) -> Self | None:
        """Read the parent of a checkpoint; None if the checkpoint has all rows itself.

        Raises:
            ArgumentError: the file is not such a record, or names no earlier checkpoint.
        """
        try:
            parent = cls(**read_json(checkpoint / PARENT))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{PARENT} is not a record of a checkpoint: {error}") from error
        if not isinstance(parent.round, int) or not 0 <= parent.round < int(checkpoint.name):
            raise ArgumentError(f"{PARENT} names the round {parent.round}, expected an earlier one")
        return parent


def identity_of(checkpoint: Path) -> int:
    """Return the CRC-32 of a checkpoint's checksums, which differs from that of any other one."""
    return zlib.crc32((checkpoint / CHECKSUMS).read_bytes())


def lineage(folder: Path, step: int) -> list[tuple[int, Parent | None]]:
    """Return the checkpoints that have the rows of a checkpoint: all rows first, itself last."""
    found = []
    next_step: int | None = step
    while next_step is not None:
        parent = Parent.read(folder / str(next_step))
        found.append((next_step, parent))
        next_step = None if parent is None else parent.round
    return found[::-1]


def read_parents(folder: Path, steps: Iterable[int]) -> dict[int, int]:
    """Return the parent's round of each checkpoint that has one.

    Raises:
        OSError: a file cannot be read, such as without permission. The parent would be deleted.
    """
    parents = {}
    for step in steps:
        try:
            parent = Parent.read(folder / str(step))
        except (IsADirectoryError, ValueError):  # told when the checkpoint is read
            continue
        if parent is not None:
            parents[step] = parent.round
    return parents
