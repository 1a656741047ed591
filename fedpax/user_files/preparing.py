"""prepare_files: sort files by client, larger than memory, into a folder that is memory-mapped."""

import contextlib
import errno
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedpax.errors import ArgumentError
from fedpax.paths import expand_home
from fedpax.user_files.columns import check_client_numbers
from fedpax.user_files.file_sizes import estimate_bytes
from fedpax.user_files.finding import DataFile, is_url
from fedpax.user_files.formats import BadRows, ReadOptions, TypeChangedError
from fedpax.user_files.held_out import part_of_split
from fedpax.user_files.load_options import LoadOptions
from fedpax.user_files.path_columns import Fields, add_path_columns, path_fields
from fedpax.user_files.prepared import open_prepared, write_prepared
from fedpax.user_files.read_table import stream_tables
from fedpax.user_files.readers.own_clients import has_own_clients, mark_clients
from fedpax.user_files.schemas import conform, fits, unify
from fedpax.user_files.selection import Selection, select_files
from fedpax.user_files.sorting import MEMORY, sort_tables
from fedpax.user_files.table_source import TableSource, check_columns

_LOCK = "lock"  # held by the process that writes the draft


class Prepared(NamedTuple):
    """What `prepare` has written.

    Attributes:
        source: the examples, as `fedpax.data.load` opens the folder.
        skipped: the number of rows that were skipped, by file.
        first_skipped: the beginning of the first of them, by file.
    """

    source: TableSource
    skipped: dict[str, int]
    first_skipped: dict[str, str]


def prepare_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: LoadOptions,
    *,
    on_bad_row: str,
    memory: str | None,
) -> Prepared:
    """Prepare files; see `fedpax.data.prepare`."""
    if on_bad_row not in ("error", "skip"):
        raise ArgumentError(f"on_bad_row is {on_bad_row!r}, expected 'error' or 'skip'.")
    if memory is not None and not re.fullmatch(MEMORY, memory):
        raise ArgumentError(f"memory is {memory!r}, expected an amount such as '4GB'.")
    if is_url(os.fspath(out)):
        raise ArgumentError(
            f"out={os.fspath(out)!r} is in a bucket, expected a local folder: prepared files are "
            "memory-mapped. Prepare to a local disk, and copy the folder."
        )
    out = expand_home(Path(out)).absolute()
    if out.exists():
        raise ArgumentError(f"out={str(out)!r} exists, expected a new folder. Give another one.")
    selected = select_files(files, options)
    bad_rows = BadRows() if on_bad_row == "skip" else None
    reading = Reading(selected, options, bad_rows)
    reading.read_schema(first_part=True)
    check_columns(
        reading.schema.names, {"client": reading.client, "label": options.label}, selected.name
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    needed = estimate_bytes(selected.groups)
    _check_space(out.parent, needed)
    with _draft(out) as draft:
        try:
            about = {"client": reading.client, "label": options.label, "files": selected.name}
            written = _write(reading, draft, about, memory or _half_of_memory())
            written.rename(out)
        except OSError as error:
            if error.errno != errno.ENOSPC and "No space left" not in str(error):
                raise
            raise _no_space(out.parent, needed) from error
    bad = bad_rows or BadRows()
    return Prepared(open_prepared(out), bad.count, bad.first)


@contextlib.contextmanager
def _draft(out: Path) -> Iterator[Path]:
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


def lock_file(file: IO[bytes]) -> bool:
    """Lock a file until it is closed or the process ends; return False if another holds it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # no POSIX system, or no locks
        return False
    return True


def _write(reading: "Reading", draft: Path, about: dict[str, Any], memory: str) -> Path:
    """Write the folder within the draft; again if a later part of a file changes a type."""
    for attempt in range(3 + len(reading.schema) * len(reading.groups)):
        folder, spill = draft / f"data-{attempt}", draft / f"spill-{attempt}"
        folder.mkdir()
        keys = [about["client"]] if about["client"] is not None else []
        try:
            tables: Iterator[pa.Table] = reading.tables()
            if keys:
                tables = sort_tables(tables, reading.schema, keys, spill, memory)
            write_prepared(folder, tables, reading.schema, about)
            return folder
        except TypeChangedError as changed:
            reading.change_type(changed)
        shutil.rmtree(spill, ignore_errors=True)
        shutil.rmtree(folder)
    raise AssertionError("every attempt settles the type of a column of a file")


class Reading:
    """The parts of files as tables of one schema, which later parts can change.

    Attributes:
        groups: the files that are read at once.
        schema: the schema of all files, with the columns that paths name.
        client: the column of clients, or None.
    """

    def __init__(self, selected: Selection, options: LoadOptions, bad_rows: BadRows | None) -> None:
        self.groups = selected.groups
        self.client = options.client
        self.schema = pa.schema([])
        self._name = selected.name
        self._options = options._replace(heldout_fraction=0.0) if selected.names_split else options
        self._read_options = selected.options._replace(bad_rows=bad_rows)
        self._bad_rows = bad_rows
        self._types: dict[str, dict[str, pa.DataType]] = {}
        self._fields: list[Fields] = []

    def read_schema(self, *, first_part: bool) -> None:
        """Read the schema from the first part of each file, or from all parts."""
        schemas = []
        for group in self.groups:
            parts = stream_tables(group, self._options_of(group[0]))
            own = [table.schema for table in ([next(parts)] if first_part else parts)]
            together = unify([group[0]] * len(own), own)
            schemas.append(mark_clients(together) if has_own_clients(own[0]) else together)
        self._fields, self.client = path_fields(self.groups, schemas, self._options.client)
        schemas = [
            _decode(add_path_columns(schema.empty_table(), fields[:1])).schema
            for schema, fields in zip(schemas, self._fields, strict=True)
        ]
        known = self.schema.names  # whose order stays when types of columns change
        files = [group[0] for group in self.groups]
        together = unify(files, schemas, self._options.optional_columns)
        names = [*known, *(name for name in together.names if name not in known)]
        self.schema = pa.schema([together.field(name) for name in names])

    def change_type(self, changed: TypeChangedError) -> None:
        """Read the schema again, with the type of a column that a later part has."""
        while True:
            if changed.column:
                self._types.setdefault(changed.path, {})[changed.column] = changed.type
            try:
                return self.read_schema(first_part=bool(changed.column))
            except TypeChangedError as further:
                changed = further

    def tables(self) -> Iterator[pa.Table]:
        """Yield all parts."""
        if self._bad_rows is not None:
            self._bad_rows.clear()
        for group, fields in zip(self.groups, self._fields, strict=True):
            row = 0
            for part in stream_tables(group, self._options_of(group[0])):
                table = _decode(add_path_columns(part, fields))
                if not fits(table.schema, self.schema):
                    raise TypeChangedError(group[0].path, "", None)
                table = conform(table, self.schema)
                if self.client is not None:
                    table = self._with_clients(table, group[0], row)
                row += part.num_rows
                table = part_of_split(self._name, table, self._options, self.client)
                if table.num_rows:
                    yield table

    def _with_clients(self, table: pa.Table, file: DataFile, row: int) -> pa.Table:
        """Leave out the examples without a client, or raise an error."""
        column = table.column(self.client)
        if self.client is not None:
            check_client_numbers(column, self.client, file.path)
        missing = np.asarray(pc.is_null(column, nan_is_null=True))
        if not missing.any():
            return table
        if self._bad_rows is None:
            raise ArgumentError(
                f"{file.path} has no client in the column {self.client!r} of example "
                f"{row + int(np.argmax(missing))}, counted from 0. Fill it in, or leave such "
                "examples out: `fedpax prepare` does with --on_bad_row=skip."
            )
        for example in table.filter(pa.array(missing)).slice(0, int(missing.sum())).to_batches():
            for k in range(len(example)):
                self._bad_rows.skip(file.path, str(example.slice(k, 1).to_pylist()[0]))
        return table.filter(pa.array(~missing))

    def _options_of(self, file: DataFile) -> ReadOptions:
        types = {**self._read_options.types, **self._types.get(file.path, {})}
        return self._read_options._replace(types=types)


def _decode(table: pa.Table) -> pa.Table:
    """Decode categories: the batches of a file have no common dictionary."""
    kinds = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(kinds, table.schema.metadata))


def _check_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise _no_space(folder, needed)


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
