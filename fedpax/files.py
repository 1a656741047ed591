"""Files that another user or program may have made: read within bounds, written without links.

A run's folder can come from others. So a file is read only if it is a regular file of a bounded
size, and a file is never written through a link, which could lead to a file of the user.
"""

import errno
import json
import os
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TextIO

from fedpax.errors import ArgumentError, FedpaxError

JSON_BYTES = 1 << 28
"""The largest JSON file that is read: the index of the largest model has a tenth of it."""

LINES_BYTES = 1 << 31
"""The largest file of JSON lines that is read: millions of rounds."""

NESTING = 100
"""The deepest nesting of JSON that is read; a configuration has about five levels."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some programs write at the start of a text in UTF-8; `read_json` reads past it."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_START = len(BYTE_ORDER_MARK + _POINTER)  # a program that rewrites texts can have added the mark
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnusableFileError(FedpaxError, OSError):
    """A file that is no regular file, is too large, or is a link; the message says which."""


def read_file(path: PurePath, max_bytes: int = JSON_BYTES) -> bytes:
    """Read a regular file: not a pipe or a device, which could block or never end.

    Args:
        path: the file, or a file in a bucket. A link to a regular file is read.
        max_bytes: the largest size.

    Returns:
        The content.

    Raises:
        UnusableFileError: the file is no regular file, or is too large.
        OSError: the file is missing or cannot be read.
        ValueError: it is a pointer of Git LFS.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> _ = path.write_bytes(b"text")
        >>> read_file(path)
        b'text'
        >>> read_file(path, max_bytes=3)
        Traceback (most recent call last):
            ...
        fedpax.files.UnusableFileError: [Errno 22] it has 4 bytes, expected at most 3: ...
    """
    if not isinstance(path, Path):  # in a bucket, which has regular files alone
        content: bytes = path.read_bytes()  # type: ignore[attr-defined]
        return content
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise _error(f"it has {size} bytes, expected at most {max_bytes}", path)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # such as files in /proc, whose size is unknown
        raise _error(f"it has more than {max_bytes} bytes", path)
    _check_is_content(content[:_START], path)
    return content


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it: not a pipe or a device, which could block or never end.

    Args:
        path: the file. A link to a regular file is opened.

    Raises:
        UnusableFileError: the file is no regular file.
        OSError: the file is missing or cannot be read.
    """
    _check_is_regular(path.stat(), path)  # to open a device can have effects
    # If the file is a pipe by now, do not wait for its other end.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    opened = os.fdopen(file, "rb")
    try:
        _check_is_regular(os.fstat(file), path)
    except BaseException:
        opened.close()
        raise
    return opened


def check_fetched(path: Path) -> None:
    """Raise a ValueError if Git LFS has left a pointer in the place of a file's content.

    Args:
        path: the file, which another library reads.

    Raises:
        UnusableFileError: the file is no regular file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> _ = path.write_text("version https://git-lfs.github.com/spec/v1")
        >>> check_fetched(path)
        Traceback (most recent call last):
            ...
        fedpax.errors.ArgumentError: ...a is a Git LFS pointer, expected the content of the ...
    """
    with open_regular(path) as file:
        _check_is_content(file.read(_START), path)


def _check_is_content(start: bytes, path: Path) -> None:
    if start.removeprefix(BYTE_ORDER_MARK).startswith(_POINTER):
        raise ArgumentError(
            f"{path} is a Git LFS pointer, expected the content of the file. Run `git lfs pull` in "
            f"{path.absolute().parent}, or download the file again"
        )


def parse_json(text: str | bytes) -> Any:
    """Parse JSON whose nesting is bounded, so that functions can follow it.

    Args:
        text: the JSON.

    Returns:
        Dicts, lists and plain values.

    Raises:
        ValueError: it is not JSON, or nested deeper than `NESTING`.

    Example:
        >>> parse_json('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> parse_json("[" * 200 + "]" * 200)
        Traceback (most recent call last):
            ...
        fedpax.errors.ArgumentError: it nests lists or objects deeper than 100 levels
    """
    too_deep = f"it nests lists or objects deeper than {NESTING} levels"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ArgumentError(too_deep) from None
    level, depth = _items([value]), 0
    while level:
        depth += 1
        if depth > NESTING:
            raise ArgumentError(too_deep)
        level = [item for outer in level for item in _items(outer)]
    return value


def _items(value: Any) -> list[Any]:
    """Return the lists and objects directly in a JSON value."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def read_json(path: PurePath, max_bytes: int = JSON_BYTES) -> Any:
    """Read a JSON file as `read_file` and `parse_json` do.

    Args:
        path: the file, or a file in a bucket.
        max_bytes: the largest size.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or nested too deeply.
    """
    return parse_json(read_file(path, max_bytes))


def open_unlinked(path: Path, flags: int, *, other_names: bool = False) -> int:
    """Open a file of a run's folder to change it in place, if no other path leads to the file.

    A symbolic link, or another name of the file (a hard link), could lead to a file of the user.

    Args:
        path: the file.
        flags: such as `os.O_WRONLY | os.O_APPEND | os.O_CREAT`.
        other_names: open a file with several names too; the caller does not change its content.

    Returns:
        The descriptor.

    Raises:
        UnusableFileError: the file is a link, has several names, or is no regular file.
        OSError: the file cannot be opened.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "link").symlink_to(folder / "file")
        >>> open_unlinked(folder / "link", os.O_WRONLY | os.O_CREAT)
        Traceback (most recent call last):
            ...
        fedpax.files.UnusableFileError: [Errno 22] it is a link, expected a regular ...
    """
    if path.is_symlink():  # for the message; the flag below closes the gap until the file is open
        raise _error("it is a link, expected a regular file of this folder", path)
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    file = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)
    try:
        status = os.fstat(file)
        _check_is_regular(status, path)
        if status.st_nlink > 1 and not other_names:
            raise _error(
                f"it has {status.st_nlink} names (hard links), expected one: the others would "
                "change with it. Copy the folder with its files",
                path,
            )
    except BaseException:
        os.close(file)
        raise
    return file


def append_to(path: Path) -> TextIO:
    """Open a text file of a run's folder to append to it, as `open_unlinked` does."""
    file = open_unlinked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(file, "a", encoding="utf-8")


def replace_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file such that a kill leaves the old or the new content, never a part.

    A link at its place is replaced, not followed.

    Args:
        path: the file, in an existing folder.
        content: the new content.
        sync: wait until the content is on the disk, so that a crash of the machine leaves no part.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "theirs").write_text("old")
        >>> (folder / "link").symlink_to("theirs")
        >>> replace_file(folder / "link", b"new")
        >>> (folder / "theirs").read_text(), (folder / "link").read_text()
        ('old', 'new')
    """
    draft = path.with_name(f".{path.name}.draft")
    with os.fdopen(create_draft(draft), "wb") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    draft.replace(path)


def find_links(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the links among folders and the entries directly in them.

    Args:
        folder: a folder, such as that of a run.
        names: the names of folders in it, which may be missing.
    """
    found = []
    for path in (folder / name for name in names):
        if path.is_symlink():
            found.append(path)
        elif path.is_dir():
            with os.scandir(path) as entries:
                found += [path / entry.name for entry in entries if entry.is_symlink()]
    return found


def is_private(folder: Path) -> bool:
    """Return whether a folder belongs to this user alone, and is no link.

    Args:
        folder: the folder.

    Raises:
        OSError: the folder is missing.
    """
    status = folder.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    if not hasattr(os, "getuid"):
        return is_folder
    return is_folder and status.st_uid == os.getuid() and not status.st_mode & 0o022


def create_draft(path: Path) -> int:
    """Create a new file for writing, in place of the remains of a killed process.

    Args:
        path: the file.

    Returns:
        The descriptor of a file that did not exist before.

    Raises:
        OSError: the file cannot be created.
    """
    path.unlink(missing_ok=True)  # a link is removed, not followed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)


def _check_is_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise _error(f"it is {kind}, expected a regular file", path)


def _error(reason: str, path: Path) -> UnusableFileError:
    return UnusableFileError(errno.EINVAL, reason, str(path))


def describe_no_permission(path: PurePath) -> str:
    """Return the message for a file that this user must not read or write.

    Args:
        path: the file or folder.
    """
    try:
        owner = f"it belongs to {Path(path).owner()}"
    except (OSError, KeyError, NotImplementedError):
        owner = "its owner is unknown"
    return (
        f"{path}: permission denied ({owner}), expected a file that this user can use. Nothing is "
        f"damaged: give the permission, for example `chmod -R u+rwX {shlex.quote(str(path.parent))}"
        "`, or run the command as the owner."
    )
