"""Files that another user or program may have made: read within bounds, written without links."""

import contextlib
import errno
import json
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, TextIO

from fedpax.errors import ArgumentError, ConfigurationError, FedpaxError

JSON_BYTES = 1 << 28
"""The largest JSON file that is read: the index of the largest model has a tenth of it."""

LINES_BYTES = 1 << 31
"""The largest file of JSON lines that is read: millions of rounds."""

NESTING = 100
"""The deepest nesting of JSON that is read; a configuration has about five levels."""

_TOO_DEEP = f"it nests lists or objects deeper than {NESTING} levels"

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some programs write at the start of a text in UTF-8; `read_json` reads past it."""

_MAKE_ROOM = "Make room on the disk"
NO_ROOM = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`)",
}
"""The remedy for each error of a file that cannot be written because it does not fit."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_START = len(BYTE_ORDER_MARK + _POINTER)  # a program that rewrites texts can have added the mark
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnusableFileError(FedpaxError, OSError):
    """A file that is not a regular file, is too large, or is a link; the message says which."""


def read_file(path: PurePath, max_bytes: int = JSON_BYTES) -> bytes:
    """Read a regular file: not a pipe or a device, which could block or never end."""
    if not isinstance(path, Path):  # in a bucket, which has regular files alone
        content: bytes = path.read_bytes()  # type: ignore[attr-defined]  # of etils.epath
        return content
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise _error(f"it has {size} bytes, expected at most {max_bytes}", path)
        # Memory is reserved for as many bytes as could come; the file can grow meanwhile.
        content = file.read(min(max_bytes, size + JSON_BYTES) + 1)
    if len(content) > max_bytes:  # such as files in /proc, whose size is unknown
        raise _error(f"it has more than {max_bytes} bytes", path)
    _check_is_content(content[:_START], path)
    return content


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it: not a pipe or a device, which could block or never end."""
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
    """Raise a ValueError if Git LFS has left a pointer in the place of a file's content."""
    with open_regular(path) as file:
        _check_is_content(file.read(_START), path)


def _check_is_content(start: bytes, path: Path) -> None:
    if start.removeprefix(BYTE_ORDER_MARK).startswith(_POINTER):
        raise ArgumentError(
            f"{path} is a Git LFS pointer, expected the content of the file. Run `git lfs pull` in "
            f"{path.absolute().parent}, or download the file again"
        )


def parse_json(text: str | bytes) -> Any:
    """Parse JSON whose nesting is bounded, so that functions can follow it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ArgumentError(_TOO_DEEP) from None
    check_nesting(value)
    return value


def is_utf8(text: bytes) -> bool:
    """Return whether bytes are text in UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_nesting(value: Any) -> None:
    """Raise a ValueError if a JSON value nests too deep for functions that follow it."""
    level, depth = _items([value]), 0
    while level:
        depth += 1
        if depth > NESTING:
            raise ArgumentError(_TOO_DEEP)
        level = [item for outer in level for item in _items(outer)]


def _items(value: Any) -> list[Any]:
    """Return the lists and objects directly in a JSON value."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def read_json(path: PurePath, max_bytes: int = JSON_BYTES) -> Any:
    """Read a JSON file as `read_file` and `parse_json` do."""
    return parse_json(read_file(path, max_bytes))


@contextlib.contextmanager
def explain_damage(
    path: PurePath, expectation: str, error: type[Exception] = ConfigurationError
) -> Iterator[None]:
    """Raise an error with its remedy for a file of fedpax that the block cannot read or parse."""
    try:
        yield
    except PermissionError:
        raise  # no damage
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as damage:
        name = type(damage).__name__
        raise error(f"{path} cannot be read ({name}: {damage}), {expectation}") from damage


def open_unlinked(path: Path, flags: int, *, other_names: bool = False) -> int:
    """Open a file of a run's folder to change it in place, if no link leads to a user's file."""
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


def replace_file(path: Path, content: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
    """Write a file such that a kill leaves the old or the new content; a link is not followed."""
    with replacing(path, sync=sync, mode=mode) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(
    path: Path, *, sync: bool = True, draft: Path | None = None, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Yield the draft that replaces a file at the end, as `replace_file` does."""
    # Processes that write one file at a time need drafts of different names.
    draft = path.with_name(f".{path.name}.draft") if draft is None else draft
    with os.fdopen(create_draft(draft, mode), "wb") as file:
        yield file
        file.flush()
        if sync:
            os.fsync(file.fileno())
    draft.replace(path)


def lock_file(file: int | IO[Any], *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock a file until it is closed; False: another process has it, None: there are no locks."""
    # A process that ends releases its locks. To wait where a file system has no locks raises.
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        if wait:
            raise
        return None
    return True


def find_links(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the links among folders and the entries directly in them."""
    links = []
    for path in (folder / name for name in names):
        if path.is_symlink():
            links.append(path)
        elif path.is_dir():
            with os.scandir(path) as entries:
                links += [path / entry.name for entry in entries if entry.is_symlink()]
    return links


def is_private(folder: Path) -> bool:
    """Return whether a folder belongs to this user alone, and is no link."""
    status = folder.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    if not hasattr(os, "getuid"):
        return is_folder
    return is_folder and status.st_uid == os.getuid() and not status.st_mode & 0o022


def create_draft(path: Path, mode: int = 0o666) -> int:
    """Create a new file for writing, in place of the remains of a killed process."""
    path.unlink(missing_ok=True)  # a link is removed, not followed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | getattr(os, "O_BINARY", 0), mode)


def _check_is_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        described = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise _error(f"it is {described}, expected a regular file", path)


def _error(reason: str, path: Path) -> UnusableFileError:
    return UnusableFileError(errno.EINVAL, reason, str(path))


def describe_no_permission(path: PurePath) -> str:
    """Return the message for a file that this user must not read or write."""
    try:
        owner = f"it belongs to {Path(path).owner()}"
    except (OSError, KeyError, NotImplementedError):
        owner = "its owner is unknown"
    return (
        f"{path}: permission denied ({owner}), expected a file that this user can use. Nothing is "
        f"damaged: give the permission, for example `chmod -R u+rwX {shlex.quote(str(path.parent))}"
        "`, or run the command as the owner."
    )
