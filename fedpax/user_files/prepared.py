"""A prepared folder: examples sorted by client in memory-mapped columns, and an index of clients.

examples.arrow   Arrow IPC; a client's examples are in one batch unless they exceed it
clients.arrow    Arrow IPC; each client's name and first example
prepared.json    what was prepared, how many examples and clients; written last
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from fedpax.errors import ArgumentError
from fedpax.files import read_json
from fedpax.paths import expand_home
from fedpax.user_files.finding import is_url
from fedpax.user_files.folders import PREPARED
from fedpax.user_files.table_source import ClientNames, TableSource

EXAMPLES, CLIENTS = "examples.arrow", "clients.arrow"
_FORMAT = 1
_BATCH_BYTES = 1 << 25
_BATCH_ROWS = 1 << 17


def write_prepared(
    folder: Path, tables: Iterable[pa.Table], schema: pa.Schema, about: dict[str, Any]
) -> None:
    """Write examples that are sorted by `about["client"]`; prepared.json keeps `about`."""
    client = about["client"]
    index = _ClientIndex()
    rows = 0
    with ipc.new_file(str(folder / EXAMPLES), schema) as writer:

        def write(table: pa.Table) -> None:
            nonlocal rows
            for batch in table.combine_chunks().to_batches():
                writer.write_batch(batch)
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
        about = {**about, "num_clients": len(names)}
    content = {"format": _FORMAT, **about, "num_examples": rows}
    (folder / PREPARED).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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
    """Return the prepared folder that a path names, or None if it names something else.

    A path is the folder, or the parent of the folders of splits, or has `{split}`.
    """
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
    remedy = "Delete the folder and prepare it again."
    about = read_json(folder / PREPARED)
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise ArgumentError(f"{folder / PREPARED} is not of format {_FORMAT}. {remedy}")
    try:
        table = _map(folder / EXAMPLES)
        starts = names = None
        if about["client"] is not None:
            clients = _map(folder / CLIENTS)
            starts = np.append(clients["start"].to_numpy(), table.num_rows)
            names = ClientNames(clients["name"])
    except PermissionError:
        raise
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ArgumentError(
            f"The prepared folder {folder} is damaged: {error}. {remedy}"
        ) from error
    if about.get("num_examples") != table.num_rows or (starts is not None and starts[0] != 0):
        raise ArgumentError(
            f"The prepared folder {folder} has {table.num_rows} examples, expected "
            f"{about.get('num_examples')}. {remedy}"
        )
    if starts is not None and not (np.diff(starts) > 0).all():
        raise ArgumentError(
            f"The prepared folder {folder} is damaged: its clients do not follow one another. "
            f"{remedy}"
        )
    return TableSource(
        str(folder),
        folder,
        table,
        client=about["client"],
        client_starts=starts,
        client_names=names,
        label=label or about.get("label"),
    )


def _map(path: Path) -> pa.Table:
    return ipc.open_file(pa.memory_map(str(path))).read_all()
