"""Checksums of a checkpoint's files: a checkpoint without them is unfinished, or damaged.

On a disk, the files are read. In a bucket they are not: the store has computed their CRC-32C.
"""

import base64
import errno
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

from fedpax.checkpoints.remote import list_files
from fedpax.files import read_json
from fedpax.run_files.configuration import is_remote, write_atomically

FILE = "checksums.json"
# Orbax writes these two when it renames the checkpoint. They hold no data, but the time.
IGNORED = {FILE, "_CHECKPOINT_METADATA", "commit_success.txt"}
NOT_DAMAGE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT}
)
"""Errors of the operating system that say nothing about a file's content."""
NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of a path that leads to no file; the last one is a link to itself."""
CHUNK_BYTES = 1 << 24


def write_checksums(folder: Path) -> None:
    """Write the size and the CRC-32 of every file in a folder to `checksums.json` there.

    In a bucket it is the CRC-32C, in base64.

    Args:
        folder: a checkpoint whose files are complete.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "data").write_bytes(b"parameters")
        >>> write_checksums(folder)
        >>> find_damage(folder) is None
        True
        >>> _ = (folder / "data").write_bytes(b"pArameters")
        >>> find_damage(folder)
        'data has another checksum'
    """
    if is_remote(folder):
        found = list_files(folder)
        content: dict[str, Any] = {n: found[n] for n in sorted(found) if not _is_ignored(n)}
    else:
        content = {
            name: ((path := folder / name).stat().st_size, _crc(path)) for name in _files(folder)
        }
    write_atomically(folder / FILE, json.dumps(content, indent=2) + "\n")


def has_checksums(folder: Path) -> bool:
    """Return whether a folder has its checksums, which are written last.

    Raises:
        PermissionError: this user must not look into the folder.
    """
    if is_remote(folder):
        return (folder / FILE).is_file()
    try:  # Path.is_file returns False without permission in Python 3.14
        return stat.S_ISREG((folder / FILE).stat().st_mode)
    except OSError as error:
        if error.errno in NO_FILE:
            return False
        raise


def find_damage(folder: Path) -> str | None:
    """Compare the files of a folder with their checksums.

    Args:
        folder: a checkpoint with `checksums.json`.

    Returns:
        The first difference in words, or None if there is none.

    Raises:
        OSError: a file cannot be read for another reason than damage, such as its permissions.
    """
    try:
        expected = read_json(folder / FILE)
        if not is_remote(folder) and (name := _find_special(folder)):
            return f"{name} is no regular file"
        listed = list_files(folder) if is_remote(folder) else None
        for name, (size, crc) in expected.items():
            if name not in listed if listed is not None else not (folder / name).is_file():
                return f"{name} is missing"
            # The size first: a file of another size, which can be terabytes, is not read.
            found = (folder / name).stat().st_size if listed is None else listed[name][0]
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if listed is not None and isinstance(crc, str):
                found_crc: Any = listed[name][1]
            elif isinstance(crc, str):  # copied from a bucket
                found_crc = _crc32c(folder / name, crc)
            else:
                found_crc = _crc(folder / name)
            if found_crc != crc:
                return f"{name} has another checksum"
    except (ValueError, TypeError, AttributeError) as error:
        return f"{FILE} cannot be read ({error})"
    except OSError as error:
        if error.errno in NOT_DAMAGE:
            raise
        return f"a file cannot be read ({error})"
    return None  # a file without a checksum was added later, and is not read


def _files(folder: Path) -> list[str]:
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    found = (path for path in paths if not _is_ignored(path.name))
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _find_special(folder: Path) -> str | None:
    """Return the path of a file that is no regular one: reading a pipe would not end."""
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
