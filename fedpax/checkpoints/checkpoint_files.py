"""The files of checkpoints: their checksums, parents, and damaged or deleted ones."""

import base64
import errno
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedpax.checkpoints.orbax_files import (
    CHUNK_BYTES,
    COMMITTED,
    is_object_store,
    remove_folder,
)
from fedpax.console import print_error
from fedpax.errors import ArgumentError, FedpaxError
from fedpax.files import read_json
from fedpax.run_files.paths import (
    CHECKPOINTS,
    CHECKSUMS,
    complete_rounds,
    has_checksums,
    is_remote,
    list_files,
    resolve_folder,
    write_atomically,
)

PARENT = "parent.json"
"""The file of a checkpoint that has only the rows that changed since another checkpoint."""

DELETED = "deleted"
"""The folder beside checkpoints to which one is moved before its files are removed."""

# Orbax writes the last two when it renames the checkpoint. They hold no data, but the time.
IGNORED = {CHECKSUMS, "_CHECKPOINT_METADATA", COMMITTED}

NOT_DAMAGE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT}
)
"""Errors of the operating system that say nothing about a file's content."""


class Parent(NamedTuple):
    """The checkpoint that a checkpoint's rows of client stores complete."""

    round: int
    position: int  # number of checkpoints since the one that has all rows, with this one
    stores: list[list[str]]  # the path of each client store in the state
    # `identity_of` the parent when the checkpoint was written: another one of the same round has
    # other rows
    identity: int = 0

    @classmethod
    def read(cls, checkpoint: Path) -> Self | None:
        """Read the parent of a checkpoint; None if the checkpoint has all rows itself."""
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
    """Return the CRC-32 of a checkpoint's checksums."""
    return zlib.crc32((checkpoint / CHECKSUMS).read_bytes())


def lineage(folder: Path, step: int) -> list[tuple[int, Parent | None]]:
    """Return the checkpoints with the rows of a checkpoint: all rows first, itself last."""
    checkpoints = []
    next_step: int | None = step
    while next_step is not None:
        parent = Parent.read(folder / str(next_step))
        checkpoints.append((next_step, parent))
        next_step = None if parent is None else parent.round
    return checkpoints[::-1]


def read_parents(folder: Path, steps: Iterable[int]) -> dict[int, int]:
    """Return the parent's round of each checkpoint that has one, or raise an OSError."""
    parents = {}
    for step in steps:
        try:
            parent = Parent.read(folder / str(step))
        except (IsADirectoryError, ValueError):  # told when the checkpoint is read
            continue
        if parent is not None:
            parents[step] = parent.round
    return parents


def write_checksums(folder: Path) -> None:
    """Write sizes and CRC-32s, in a bucket CRC-32Cs, of files to `checksums.json`."""
    if is_remote(folder):
        listed = list_files(folder)
        content: dict[str, Any] = {n: listed[n] for n in sorted(listed) if not _is_ignored(n)}
    else:
        content = {
            name: ((path := folder / name).stat().st_size, _crc(path)) for name in _files(folder)
        }
    write_atomically(folder / CHECKSUMS, json.dumps(content, indent=2) + "\n")


def find_damage(checkpoint: Path) -> str | None:
    """Compare the files of a checkpoint and its ancestors with their checksums."""
    needed, damage = "", find_own_damage(checkpoint)
    while damage is None:
        try:
            parent = Parent.read(checkpoint)
        except ValueError as error:
            damage = str(error)
            break
        if parent is None:
            return None
        needed = (
            f"the checkpoint of round {parent.round}, which has other rows of its client stores,"
        )
        checkpoint = checkpoint.with_name(str(parent.round))
        if not has_checksums(checkpoint):
            return f"{needed} is missing"
        if identity_of(checkpoint) != parent.identity:
            return f"{needed} is another one than at the time of the save"
        damage = find_own_damage(checkpoint)
    return f"{needed} is damaged ({damage})" if needed else damage


def find_own_damage(folder: Path) -> str | None:
    """Compare the files of a folder with their checksums."""
    try:
        expected = read_json(folder / CHECKSUMS)
        if not is_remote(folder) and (name := _find_special(folder)):
            return f"{name} is not a regular file"
        listed = list_files(folder) if is_remote(folder) else None
        for name, (size, crc) in expected.items():
            if name not in listed if listed is not None else not (folder / name).is_file():
                return f"{name} is missing"
            # The size first: a file of another size, which can be terabytes, is not read.
            size_now = (folder / name).stat().st_size if listed is None else listed[name][0]
            if size_now != size:
                return f"{name} has {size_now} bytes instead of {size}"
            if listed is not None and isinstance(crc, str):
                found_crc: Any = listed[name][1]
            elif isinstance(crc, str):  # copied from a bucket
                found_crc = _crc32c(folder / name, crc)
            else:
                found_crc = _crc(folder / name)
            if found_crc != crc:
                return f"{name} has another checksum"
    except (ValueError, TypeError, AttributeError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    except OSError as error:
        if error.errno in NOT_DAMAGE:
            raise
        return f"a file cannot be read ({error})"
    return None  # a file without a checksum was added later, and is not read


def _files(folder: Path) -> list[str]:
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    files = (path for path in paths if not _is_ignored(path.name))
    return sorted(path.relative_to(folder).as_posix() for path in files)


def _find_special(folder: Path) -> str | None:
    """Return the path of a file that is not a regular one: reading a pipe would not end."""
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            if path.exists() and not path.is_file():
                return path.relative_to(folder).as_posix()
    return None


def _is_ignored(name: str) -> bool:
    return name.rpartition("/")[2] in IGNORED


def _crc32c(path: Path, expected: str) -> str:
    """Return the CRC-32C; without the extra `gcs`, the one that is expected."""
    try:
        import google_crc32c
    except ImportError:
        return expected
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        for _ in checksum.consume(file, CHUNK_BYTES):
            pass
    return base64.b64encode(checksum.digest()).decode()


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


class DamagedCheckpointError(FedpaxError, OSError):
    """A checkpoint whose files have changed since they were saved."""


def check_latest_round(job_log_dir: str | Path) -> None:
    """Compare the newest complete checkpoint of a run with its checksums."""
    folder = resolve_folder(job_log_dir) / CHECKPOINTS
    for step in complete_rounds(folder)[-1:]:
        if damage := find_damage(folder / str(step)):
            raise damaged_checkpoint(folder, step, damage)


def damaged_checkpoint(folder: Path, step: int, damage: str) -> DamagedCheckpointError:
    """Make the error for a damaged checkpoint, with the newest undamaged one before it."""
    delete = [str(folder / str(step))]
    before = None
    for number in reversed(complete_rounds(folder)):
        if number < step:
            try:
                is_whole = find_damage(folder / str(number)) is None
            except OSError:
                break  # such as a missing permission: its state is unknown
            if is_whole:
                before = number
                break
            delete.append(str(folder / str(number)))
    remedy = (
        f"delete {' and '.join(delete)} to resume from the checkpoint of round {before}"
        if before is not None
        else f"delete {' and '.join(delete)} to start again, since no earlier checkpoint is whole"
    )
    return DamagedCheckpointError(
        f"The checkpoint of round {step} is damaged: {damage}, expected the files as they were "
        f"saved. Restore them from a copy, or {remedy}."
    )


def set_aside_unfinished(folder: Path) -> None:
    """Remove unfinished and half deleted checkpoints, and rename those without checksums."""
    if not folder.is_dir():
        return
    remove_deleted(folder)
    for path in folder.iterdir():
        if not path.name.isdecimal() or not path.is_dir() or has_checksums(path):
            continue
        unfinished = is_object_store(path) and not (path / COMMITTED).is_file()
        if unfinished or not any(entry.is_file() for entry in path.rglob("*")):
            remove_folder(path)
            print_error(f"Removed {path}: the checkpoint is unfinished.")
            continue
        aside = _set_aside(path, "without_checksums")
        print_error(
            f"Moved {path} to {aside}: the checkpoint is unfinished or incomplete, it has no "
            "checksums.json. If a copy left that file out, copy it back."
        )


def remove_deleted(folder: Path) -> None:
    """Remove what is left of deleted checkpoints, which a kill can have interrupted."""
    if not is_object_store(folder) and (folder / DELETED).is_dir():
        remove_folder(folder / DELETED)


def set_aside_after(folder: Path, round_number: int) -> None:
    """Rename the complete checkpoints of later rounds, which a run trains again."""
    for step in complete_rounds(folder):
        if step > round_number:
            aside = _set_aside(folder / str(step), f"before_round_{round_number}_resumed")
            print_error(
                f"Moved {folder / str(step)} to {aside}: the run resumes from the older state of "
                f"round {round_number}, and trains the later rounds again."
            )


def _set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint to `checkpoint_ROUND_WHY`, and return its path."""
    aside = checkpoint.parent.with_name(f"checkpoint_{checkpoint.name}_{why}")
    while aside.exists():
        aside = aside.with_name(aside.name + "_")
    return checkpoint.rename(aside)
