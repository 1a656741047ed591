"""Checksums of a checkpoint's files: a checkpoint without them is unfinished, or damaged."""

import json
import os
import zlib
from pathlib import Path

from fedpax.training.configuration import write_atomically

FILE = "checksums.json"
# Orbax writes these two when it renames the checkpoint. They hold no data, and are not read.
IGNORED = {FILE, "_CHECKPOINT_METADATA", "commit_success.txt"}
CHUNK_BYTES = 1 << 24


def write_checksums(folder: Path) -> None:
    """Write the size and the CRC-32 of every file in a folder to `checksums.json` there.

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
    content = {name: _size_and_crc(folder / name) for name in _files(folder)}
    write_atomically(folder / FILE, json.dumps(content, indent=2) + "\n")


def has_checksums(folder: Path) -> bool:
    """Return whether a folder has its checksums, which are written last."""
    return (folder / FILE).is_file()


def find_damage(folder: Path) -> str | None:
    """Compare the files of a folder with their checksums.

    Args:
        folder: a checkpoint with `checksums.json`.

    Returns:
        The first difference in words, or None if there is none.
    """
    try:
        expected = json.loads((folder / FILE).read_bytes())
        for name, (size, crc) in expected.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            found = _size_and_crc(folder / name)
            if found[0] != size:
                return f"{name} has {found[0]} bytes instead of {size}"
            if found[1] != crc:
                return f"{name} has another checksum"
    except (ValueError, TypeError, AttributeError) as error:
        return f"{FILE} cannot be read ({error})"
    except OSError as error:
        return f"a file cannot be read ({error})"
    return None  # a file without a checksum was added later, and is not read


def _files(folder: Path) -> list[str]:
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    found = (path for path in paths if path.name not in IGNORED)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _size_and_crc(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
