"""A prepared folder: examples sorted by client in memory-mapped columns, and an index of clients.

`examples.arrow`, `clients.arrow` (name and first example), `records.bin` (scalars of small
clients) and `prepared.json`, written last; or several such folders, its shards.
"""

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import ipc

from fedpax.console import count_of
from fedpax.errors import ArgumentError
from fedpax.files import read_json
from fedpax.user_files.arrow_numpy import (
    are_images,
    is_integer_or_float,
    is_scalar,
    numpy_dtype,
    to_numpy,
)
from fedpax.user_files.finding import is_url
from fedpax.user_files.folders import PREPARED
from fedpax.user_files.row_gatherers import Records
from fedpax.user_files.table_source import ClientNames, TableSource
from fedpax.user_paths import expand_home

EXAMPLES, CLIENTS = "examples.arrow", "clients.arrow"
_FORMAT = 1
_HASHES = "image_hashes"  # in prepared.json: images that were encoded have their hashes
_BATCH_BYTES = 1 << 25
_BATCH_ROWS = 1 << 17
_STEP = 8  # bytes: Arrow places batches at multiples of them
_MOST_PADDING = 1 << 20  # bytes of a batch
_SHARD = re.compile(r"shard-\d+")
_REMEDY = "Delete the folder and prepare it again."


def write_prepared(
    folder: Path, tables: Iterable[pa.Table], schema: pa.Schema, about: dict[str, Any]
) -> None:
    """Write examples that are sorted by `about["client"]`; prepared.json keeps `about`."""
    client = about["client"]
    index = _ClientIndex()
    rows = 0
    with pa.OSFile(str(folder / EXAMPLES), "wb") as sink, ipc.new_file(sink, schema) as writer:
        grid = RowGrid(schema, sink)

        def write(table: pa.Table) -> None:
            nonlocal rows
            for batch in table.combine_chunks().to_batches():
                writer.write_batch(batch, custom_metadata=grid.metadata(batch))
                rows += len(batch)

        waiting = schema.empty_table()
        for table in tables:
            if client is not None:
                index.add(table.column(client))
            waiting = pa.concat_tables([waiting, table])
            if waiting.nbytes < _BATCH_BYTES and waiting.num_rows < _BATCH_ROWS:
                continue
            # The last client may continue in the next table.
            cut = waiting.num_rows if client is None else index.last_start - rows
            if cut <= 0 and waiting.nbytes >= 4 * _BATCH_BYTES:  # one client fills the memory
                cut = waiting.num_rows
            if cut > 0:
                write(waiting.slice(0, cut))
                waiting = waiting.slice(cut)
        write(waiting)
    if not rows:
        raise ArgumentError(
            f"{about['files']} has no examples, expected at least one. Name others."
        )
    if client is not None:
        names, starts = index.finish()
        clients = pa.table({"name": names, "start": pa.array(starts)})
        with ipc.new_file(str(folder / CLIENTS), clients.schema) as writer:
            writer.write_table(clients)
        records = write_records(folder, _map(folder / EXAMPLES), len(names))
        about = {**about, "num_clients": len(names), **({_COLUMNS: records} if records else {})}
    (folder / PREPARED).write_text(encode_about({**about, "num_examples": rows}), encoding="utf-8")


def encode_about(about: dict[str, Any]) -> str:
    """Return the content of prepared.json."""
    return json.dumps({"format": _FORMAT, _HASHES: True, **about}, indent=1) + "\n"


class RowGrid:
    """Places the widest tensors of an Arrow file, such as images, on one grid.

    So one call gathers rows of all batches: unused metadata fill the distances to multiples of a
    row's size.
    """

    def __init__(self, schema: pa.Schema, sink: Any) -> None:
        sizes = {
            column: math.prod(kind.shape) * kind.value_type.bit_width // 8
            for column, kind in enumerate(schema.types)
            if isinstance(kind, pa.FixedShapeTensorType) and is_integer_or_float(kind.value_type)
        }
        self._sink = sink
        self._column = max(sizes, key=lambda column: sizes[column], default=0)
        self._size = sizes.get(self._column, 0)
        self._header = _header_bytes(schema)  # is written with the first batch
        self._first: int | None = None

    def metadata(self, batch: pa.RecordBatch) -> dict[str, str] | None:
        """Return the metadata to write with the next batch; None for a file without tensors."""
        if not self._size:
            return None
        # Where its rows begin, but for the same constant in each batch.
        before = batch.select(list(range(self._column)))
        place = max(self._sink.tell(), self._header) + ipc.get_record_batch_size(before)
        if self._first is None:
            self._first = place
        missing = (self._first - place) % self._size
        paddings = range(missing, missing + _STEP * self._size, self._size)
        padding = next((size for size in paddings if size % _STEP == 0), 0)
        return {"padding": " " * (padding if padding <= _MOST_PADDING else 0)}


def _header_bytes(schema: pa.Schema) -> int:
    empty, sink = pa.RecordBatch.from_pylist([], schema), pa.MockOutputStream()
    with ipc.new_file(sink, schema) as writer:
        writer.write_batch(empty)
        return int(sink.size()) - int(ipc.get_record_batch_size(empty))


class _ClientIndex:
    """The names and first examples of clients, from their sorted column in parts."""

    def __init__(self) -> None:
        self._names: list[Any] = []
        self._starts: list[Any] = []
        self._last: Any = None
        self._rows = 0
        self.last_start = 0

    def add(self, column: Any) -> None:
        runs = pc.run_end_encode(column.combine_chunks())
        names, ends = runs.values, runs.run_ends.to_numpy().astype(np.int64)
        starts = self._rows + np.concatenate([[0], ends[:-1]])
        first = 1 if self._rows and names[0] == self._last else 0
        self._names.append(names[first:])
        self._starts.append(starts[first:])
        if len(starts) > first:
            self.last_start = int(starts[-1])
        self._last = names[-1]
        self._rows += len(column)

    def finish(self) -> tuple[Any, Any]:
        return pa.concat_arrays(self._names), np.concatenate(self._starts)


def prepared_folder(path: str | os.PathLike[str], split: str | None) -> Path | None:
    """Return the prepared folder of a path, its parent or `{split}`, or None."""
    text = os.fspath(path)
    if is_url(text):
        return None
    folder = expand_home(text if split is None else text.replace("{split}", split))
    if (folder / PREPARED).is_file():
        if split not in (None, "train", folder.name) and "{split}" not in text:
            raise ArgumentError(
                f"The prepared folder {folder} has no split {split!r}. Prepare each split in a "
                f"folder of its own, such as {folder}/{split}, or leave split out."
            )
        return folder
    return folder / split if split is not None and (folder / split / PREPARED).is_file() else None


def open_prepared(folder: Path, label: str | None = None) -> TableSource:
    """Open a prepared folder; nothing but the index of clients is read."""
    about = _read_about(folder)
    part = _open_shards(folder, about) if "shards" in about else _open_part(folder, about)
    return TableSource(
        str(folder),
        folder,
        part.table,
        client=about["client"],
        client_starts=None if part.starts is None else np.append(part.starts, len(part.table)),
        client_names=None if part.names is None else ClientNames(part.names),
        label=label or about.get("label"),
        records=part.records,
        notes=_note_version(folder, about, part.table.schema),
    )


def _note_version(folder: Path, about: dict[str, Any], schema: pa.Schema) -> list[str]:
    """Tell of images whose hashes an earlier version has not kept."""
    if _HASHES in about or not any(map(are_images, schema.types)):
        return []
    return [
        f"{folder} was prepared by an earlier version: a held-out share of its images is chosen by "
        "their pixels and is not the one of the files. Prepare the files again"
    ]


class _PreparedPart(NamedTuple):
    """A prepared folder without shards."""

    table: pa.Table
    starts: Any  # the first example of each client. None: there are no clients
    names: Any
    records: list[Records]  # of each shard. Empty: there are none


def _read_about(folder: Path) -> dict[str, Any]:
    try:
        about = read_json(folder / PREPARED)
    except ValueError as error:
        raise _damaged(folder, f"{PREPARED}: {error}") from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT or "client" not in about:
        raise ArgumentError(f"{folder / PREPARED} is not of format {_FORMAT}. {_REMEDY}")
    return about


def _open_part(folder: Path, about: dict[str, Any]) -> _PreparedPart:
    try:
        table = _map(folder / EXAMPLES)
        starts = names = None
        # Earlier folders have "records", the names of columns without missing values.
        columns = about.get(_COLUMNS, dict.fromkeys(about.get("records", ()), False))
        records = [open_records(folder, table, columns)] if columns else []
        if about["client"] is not None:
            clients = _map(folder / CLIENTS)
            starts, names = clients["start"].to_numpy(), clients["name"]
    except PermissionError:
        raise
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, str(error)) from error
    _check_examples(folder, about, table)
    if starts is not None and (
        starts[0] != 0 or not (np.diff(np.append(starts, table.num_rows)) > 0).all()
    ):
        raise _damaged(folder, "its clients do not follow one another")
    return _PreparedPart(table, starts, names, records)


def _open_shards(folder: Path, about: dict[str, Any]) -> _PreparedPart:
    names = about["shards"]
    if not isinstance(names, list) or not all(_SHARD.fullmatch(str(name)) for name in names):
        raise _damaged(folder, f"prepared.json has the shards {names!r:.80}")
    parts = []
    for name in names:
        if not (folder / name / PREPARED).is_file():
            raise _damaged(folder, f"the shard {name} is missing")
        own = _read_about(folder / name)
        if own["client"] != about["client"]:
            raise _damaged(folder, f"the shard {name} has the client {own['client']!r}")
        parts.append(_open_part(folder / name, own))
    try:
        table = pa.concat_tables([part.table for part in parts])
        _check_examples(folder, about, table)
        if about["client"] is None:
            return _PreparedPart(table, None, None, [])
        before = np.cumsum([0, *(len(part.table) for part in parts[:-1])])
        starts = np.concatenate([n + part.starts for n, part in zip(before, parts, strict=True)])
        clients = pa.chunked_array([c for p in parts for c in p.names.chunks])
        records = [records for part in parts for records in part.records]
        return _PreparedPart(table, starts, clients, records if len(records) == len(parts) else [])
    except (pa.ArrowException, ValueError) as error:
        raise _damaged(folder, str(error)) from error


def _check_examples(folder: Path, about: dict[str, Any], table: pa.Table) -> None:
    if about.get("num_examples") != table.num_rows:
        raise ArgumentError(
            f"The prepared folder {folder} has {count_of(table.num_rows, 'example')}, expected "
            f"{about.get('num_examples')}. {_REMEDY}"
        )


def _damaged(folder: Path, why: str) -> ArgumentError:
    return ArgumentError(f"The prepared folder {folder} is damaged: {why}. {_REMEDY}")


def _map(path: Path) -> pa.Table:
    return ipc.open_file(pa.memory_map(str(path))).read_all()


# Records: the scalars of an example, then a byte for each column that misses values, 1 where it
# does.
#
# A small client's records are on one page: a round of a large population misses the caches once a
# client, not once a client and column.
RECORDS = "records.bin"
_COLUMNS = "columns_of_records"  # in prepared.json: whether a column misses values, by name
_MOST_ROWS = 64  # of a client on average: larger clients are read as fast from columns
_CACHED_ROWS = 1 << 12  # whose columns are in the cache while they are divided
_HUGE_PAGE = 1 << 21  # Linux maps a file by these pages where whole ones were written at once
_ALIGNMENT = 8  # bytes of the largest numbers


def write_records(folder: Path, table: pa.Table, num_clients: int) -> dict[str, bool]:
    """Write scalars as records, unless clients are large; return which of them miss values."""
    columns = {
        name: column.null_count > 0
        for name, column in zip(table.column_names, table.columns, strict=True)
        if is_scalar(column.type)
    }
    if len(columns) < 2 or table.num_rows > _MOST_ROWS * num_clients:
        return {}
    record, missing = _record(table.schema, columns)
    block = np.zeros(_HUGE_PAGE // (record.itemsize & -record.itemsize), record)
    in_bytes = block.view(np.bool_).reshape(len(block), record.itemsize)
    with (folder / RECORDS).open("wb") as file:
        for begin in range(0, len(table), len(block)):
            rows = table.slice(begin, len(block))
            for at in range(0, len(rows), _CACHED_ROWS):
                some = rows.slice(at, _CACHED_ROWS)
                for name in columns:
                    values = to_numpy(some.column(name))
                    block[name][at : at + len(some)] = np.ma.getdata(values)
                    if name in missing:
                        mask = np.ma.getmaskarray(values)
                        in_bytes[at : at + len(some), missing[name]] = mask
            file.write(in_bytes[: len(rows)].data)
    return columns


def open_records(folder: Path, table: pa.Table, columns: dict[str, bool]) -> Records:
    """Map the records of a table's columns."""
    record, missing = _record(table.schema, columns)
    rows: NDArray[Any] = np.memmap(folder / RECORDS, record, "r")
    if len(rows) != len(table):
        raise ArgumentError(f"{RECORDS} has {len(rows)} examples, expected {len(table)}")
    return Records(rows, missing)


def _record(schema: pa.Schema, columns: dict[str, bool]) -> tuple[np.dtype[Any], dict[str, int]]:
    """Return the aligned type of a record, and by column the byte that tells of a missing value."""
    kinds = {name: numpy_dtype(schema.field(name).type) for name in columns}
    names = sorted(kinds, key=lambda name: -kinds[name].itemsize)
    offsets = [0, *np.cumsum([kinds[name].itemsize for name in names]).tolist()]
    optional = [name for name in names if columns[name]]
    size = offsets.pop() + len(optional)
    record = np.dtype(
        {
            "names": names,
            "formats": [kinds[name] for name in names],
            "offsets": offsets,
            "itemsize": -(-size // _ALIGNMENT) * _ALIGNMENT,
        }
    )
    return record, {name: size - len(optional) + k for k, name in enumerate(optional)}
