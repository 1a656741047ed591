"""prepare_files: sort files by client, larger than memory, into a folder that is memory-mapped."""

import contextlib
import errno
import glob
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.files import lock_file
from fedpax.user_files.file_sizes import estimate_bytes
from fedpax.user_files.finding import is_url
from fedpax.user_files.formats import BadRows, LoadOptions
from fedpax.user_files.prepared import open_prepared, write_prepared
from fedpax.user_files.readers.image_files import describe_read
from fedpax.user_files.reading import Reading
from fedpax.user_files.selection import select_files
from fedpax.user_files.sorting import MEMORY, sort_tables
from fedpax.user_files.table_source import TableSource
from fedpax.user_paths import expand_home

_LOCK = "lock"  # held by the process that writes the draft


class Prepared(NamedTuple):
    """What `prepare` has written.

    `skipped` counts skipped rows by file, `first_skipped` has the beginning of the first one.
    """

    source: TableSource
    skipped: dict[str, int]
    first_skipped: dict[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on how images were read."""
        return self.source.notes

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return len(self.source)

    @property
    def num_clients(self) -> int | None:
        """The number of clients, or None if the files have none."""
        names = self.source.client_names
        return None if names is None else len(names)


def prepare_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: LoadOptions,
    *,
    on_bad_row: str,
    memory: str | None,
) -> Prepared:
    """Prepare files; see `fedpax.data.prepare`."""
    check_arguments(on_bad_row, memory)
    if is_url(os.fspath(out)):
        raise ArgumentError(
            f"out={os.fspath(out)!r} is in a bucket, expected a local folder: prepared files are "
            "memory-mapped. Prepare to a local disk, and copy the folder."
        )
    out = new_folder(out)
    read = Counter[str]()
    selected = select_files(files, options, read)
    bad_rows = BadRows() if on_bad_row == "skip" else None
    reading = Reading(selected, options, bad_rows)
    reading.read_schema(first_part=True)
    about = reading.describe()
    needed = estimate_bytes(selected.groups)
    if shutil.disk_usage(out.parent).free < needed:
        raise _no_space(out.parent, needed)
    with draft_folder(out) as draft:
        try:
            written = _write(reading, draft, about, memory or _half_of_memory())
            written.rename(out)
        except OSError as error:
            if error.errno != errno.ENOSPC and "No space left" not in str(error):
                raise
            raise _no_space(out.parent, needed) from error
    reading.log_without_examples()
    bad = bad_rows or BadRows()
    source = open_prepared(out)
    source.notes = (*source.notes, *describe_read(read))
    return Prepared(source, bad.count, bad.first)


def check_arguments(on_bad_row: str, memory: str | None) -> None:
    """Check arguments of `prepare`."""
    if on_bad_row not in ("error", "skip"):
        raise ArgumentError(f"on_bad_row is {on_bad_row!r}, expected 'error' or 'skip'.")
    if memory is not None and not re.fullmatch(MEMORY, memory):
        raise ArgumentError(f"memory is {memory!r}, expected an amount such as '4GB'.")


def new_folder(out: str | os.PathLike[str]) -> Path:
    """Return the path of a folder that does not exist; its parent is made."""
    path = expand_home(Path(out)).absolute()
    if path.exists():
        raise ArgumentError(f"out={str(path)!r} exists, expected a new folder. Give another one.")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def draft_folder(out: Path) -> Iterator[Path]:
    """Make a folder beside `out`, removed at the end; remove folders of killed processes now."""
    prefix = f".{out.name}.draft-"
    for stale in out.parent.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        with stale.open("rb") as file:
            if lock_file(file):
                shutil.rmtree(stale.parent, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        with (draft / _LOCK).open("wb") as file:
            lock_file(file)
            yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(reading: Reading, draft: Path, about: dict[str, Any], memory: str) -> Path:
    """Write the folder within the draft; again if a later part of a file changes a type."""
    folder, spill = draft / "data", draft / "spill"

    def write(again: Reading) -> Path:
        for left in (folder, spill):  # of the attempt before
            shutil.rmtree(left, ignore_errors=True)
        folder.mkdir()
        tables: Iterator[pa.Table] = again.tables()
        if about["client"] is not None:
            tables = sort_tables(tables, again.schema, [about["client"]], spill, memory)
        write_prepared(folder, tables, again.schema, about)
        return folder

    return reading.repeat(write)


def _no_space(folder: Path, needed: int) -> OSError:
    free = shutil.disk_usage(folder).free
    return OSError(
        errno.ENOSPC,
        f"{folder} has {free / 1e9:.1f} GB free, and the prepared files take about "
        f"{needed / 1e9:.1f} GB, and as much again while they are sorted if they exceed the "
        "memory. Free some space, or give out= on another disk. Nothing was written",
    )


def _half_of_memory() -> str:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no POSIX system
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return f"{total // 2 // 2**20}MiB"
    return "4GiB"
