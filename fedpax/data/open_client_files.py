"""Users' files as clients: the examples, their clients, and which of them are held out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from fedpax.console import count_of
from fedpax.data.load import load_with
from fedpax.data.tables.labels import Label, missing_label_message
from fedpax.data.tables.values import is_missing
from fedpax.errors import ArgumentError, FedpaxError
from fedpax.extras import optional
from fedpax.user_files.file_remedies import with_flags
from fedpax.user_files.formats import LoadOptions

_BLOCK_BYTES = 1 << 23


@dataclasses.dataclass(frozen=True)
class PreparedFiles:
    """Examples as arrays, or as a source of arrays if these would take much memory."""

    examples: Any  # arrays `[examples, ...]` by field, or a source of them
    labels: NDArray[Any]
    label: Label
    notes: Sequence[str]  # lines that are printed when a run starts
    cautions: Sequence[str] = ()  # lines on filled values, which an evaluation prints too

    def read(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the fields of some examples, with `label`, by their numbers or a mask."""
        if isinstance(self.examples, Mapping):
            return {name: values[rows] for name, values in self.examples.items()}
        taken: dict[str, NDArray[Any]] = self.examples.take(
            np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        )
        return taken


class StoredColumns(Mapping[str, Any]):
    """Columns of examples sorted by client, Arrow arrays; a column is read when it is indexed.

    `rows` has the place in `source` of each example. None: the same. The values of `optional`
    columns that no file has are missing.
    """

    def __init__(
        self, source: Any, rows: Int[np.ndarray, " examples"] | None, optional: Sequence[str] = ()
    ) -> None:
        self._source, self.rows = source, rows
        self._absent = [name for name in optional if name not in source.fields]
        self.name = source.name

    def __getitem__(self, name: str) -> Any:
        if name in self._absent:
            return _missing_values(len(self._source if self.rows is None else self.rows))
        column = self._source.table.column(name)
        return column if self.rows is None else column.take(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._source.fields, *self._absent])

    def __len__(self) -> int:
        return len(self._source.fields) + len(self._absent)

    @property
    def stored(self) -> Any:
        """The table of all rows, with the hashes of images."""
        return self._source.stored

    def read(self, examples: Int[np.ndarray, " chosen"]) -> dict[str, Any]:
        """Return the columns of some examples, in memory."""
        rows = examples if self.rows is None else self.rows[examples]
        table = self._source.take_table(rows)
        absent = {name: _missing_values(len(rows)) for name in self._absent}
        return {**dict(zip(table.column_names, table.columns, strict=True)), **absent}

    def block_size(self) -> int:
        """Return a number of examples that take little memory."""
        table = self._source.table
        return max(1, _BLOCK_BYTES * table.num_rows // max(1, table.nbytes))


def _missing_values(number: int) -> Any:
    import pyarrow as pa

    return pa.chunked_array([pa.nulls(number)])


class OpenFiles(NamedTuple):
    """The examples of files, and the part of each."""

    columns: StoredColumns
    client: str
    names: Sequence[str]
    owners: Int[np.ndarray, " examples"]
    heldout: Bool[np.ndarray, " examples"]  # whether an example of a training client is held out
    is_new: Bool[np.ndarray, " clients"]  # whether a client is held out with all its examples
    notes: tuple[str, ...]  # lines that tell what was read
    is_other: Bool[np.ndarray, " clients"]  # whether a client is in the held-out split alone

    @property
    def training(self) -> Bool[np.ndarray, " examples"]:
        """Tell for each example whether it is a training example."""
        return np.asarray(~self.heldout & ~self.is_new[self.owners], np.bool_)

    def blocks(
        self, chosen: Bool[np.ndarray, " examples"]
    ) -> Iterator[tuple[dict[str, Any], Int[np.ndarray, " rows"]]]:
        """Yield the columns of chosen examples in blocks, and the numbers of the examples.

        A client is in one block unless it exceeds it.
        """
        size, count = self.columns.block_size(), len(self.owners)
        begin = 0
        while begin < count:
            end = min(begin + size, count)
            if end < count:
                start = int(np.searchsorted(self.owners, self.owners[end]))
                end = start if start > begin else end
            rows = begin + np.flatnonzero(chosen[begin:end])
            if len(rows):
                yield self.columns.read(rows), rows
            begin = end

    def parts(self, chosen: Bool[np.ndarray, " examples"]) -> dict[str, NDArray[np.int64]]:
        """Return the chosen examples of each client that has any, by its name."""
        rows = np.flatnonzero(chosen)
        owners = self.owners[rows]
        ends = np.searchsorted(owners, np.arange(len(self.names) + 1))
        return {
            name: rows[begin:end]
            for name, begin, end in zip(self.names, ends, ends[1:], strict=False)
            if end > begin
        }


def open_client_files(
    files: Sequence[str],
    options: LoadOptions,
    *,
    missing_label: str,
    heldout_fraction: float,
    heldout_clients: float,
    heldout_split: str | None,
    one_client: str | None = None,
) -> OpenFiles:
    """Read files, and decide which examples are held out; `FilesConfig` has the settings."""
    # `heldout_split` is the split that is held out, or None if a hash chooses the examples.
    # `one_client` names the client of one file that has no clients; without it, such a file raises.
    source, client, of_heldout = _open_splits(files, options, heldout_split, one_client)
    label = options.label
    assert label is not None
    rows: Any = None
    skipped = is_missing(source.table.column(label))
    if skipped.any():
        if missing_label == "error":
            first = source.table.column(client)[int(np.argmax(skipped))].as_py()
            raise ArgumentError(missing_label_message(label, skipped, f" of {client} {first!r}"))
        rows = np.flatnonzero(~skipped)
    from fedpax.user_files.arrow_numpy import encode_values
    from fedpax.user_files.held_out import held_out
    from fedpax.user_files.table_source import ClientNames

    of_rows = source.table.column(client)
    values, owners = encode_values(of_rows if rows is None else of_rows.filter(~skipped))
    if heldout_split is not None:  # the clients of the training split are first
        in_order = np.argsort(np.unique(owners, return_index=True)[1])
        values, owners = values.take(in_order), np.argsort(in_order)[owners]
    names = [str(name) for name in ClientNames(values)]
    # Sorted by client again: the held-out split followed the training split.
    if (owners[1:] < owners[:-1]).any():
        order = np.argsort(owners, kind="stable")
        rows, owners = order if rows is None else rows[order], owners[order]
    # Clients that a partition made are no content: equal examples are on one side.
    stored = source.stored
    content = stored if options.partition is None else stored.drop_columns([client])
    chosen = held_out(content, heldout_fraction) if heldout_split is None else of_heldout
    of_clients = held_out(stored.select([client]), heldout_clients)
    if rows is not None:
        chosen, of_clients = chosen[rows], of_clients[rows]
    is_new = np.zeros(len(names), np.bool_)
    is_new[owners[of_clients]] = True
    heldout = chosen & ~is_new[owners]
    if is_new.all():
        raise ArgumentError(
            f"data.heldout_clients={heldout_clients} holds out all "
            f"{count_of(len(names), 'client')}, expected some to train on. "
            "Set a smaller --data.heldout_clients."
        )
    if not heldout.any() and not is_new.any():
        raise ArgumentError(
            f"data.heldout_fraction={heldout_fraction} holds out none of {len(owners)} "
            "examples, expected some to evaluate on. Set a larger --data.heldout_fraction or "
            "--data.heldout_clients."
        )
    is_other = np.zeros(len(names), np.bool_)
    if heldout_split is not None:
        is_other = np.bincount(owners[~chosen], minlength=len(names)) == 0
    of_others = int((heldout & is_other[owners]).sum())
    parts = [f"{int(heldout.sum()) - of_others:,} held out within clients"]
    if of_others:
        others = count_of(int((is_other & ~is_new).sum()), "client")
        parts.append(f"{of_others:,} of {others} without training examples")
    if is_new.any():
        new = count_of(int(is_new.sum()), "held-out client")
        parts.append(f"{int(is_new[owners].sum()):,} of {new}")
    sizes = f"{count_of(len(names), 'client')}, {count_of(len(owners), 'example')}"
    notes = [f"{sizes}: {', '.join(parts)}"]
    if skipped.any():
        notes.append(f"left out: {count_of(int(skipped.sum()), 'example')} without {label!r}")
    columns = StoredColumns(source, rows, options.optional_columns)
    notes.extend(source.notes)
    return OpenFiles(columns, client, names, owners, heldout, is_new, tuple(notes), is_other)


def _load(files: Any, options: LoadOptions) -> Any:
    """Open a split; a prepared folder stays in its own order, whatever a partition makes of it."""
    with optional(f"Reading {files!r}"):
        from fedpax.user_files.open_files import open_in_order
        from fedpax.user_files.prepared import prepared_folder

    with _in_flags():
        if isinstance(files, str) and (folder := prepared_folder(files, options.split)) is not None:
            return open_in_order(folder, options)
        return load_with(files, options)


@contextlib.contextmanager
def _in_flags() -> Iterator[None]:
    """Let errors name flags in place of arguments."""
    try:
        yield
    except FedpaxError as error:
        error.in_flags = with_flags(str(error))
        raise


def _open_splits(
    files: Sequence[str], options: LoadOptions, heldout_split: str | None, one_client: str | None
) -> tuple[Any, str, Bool[np.ndarray, " examples"]]:
    """Open the splits as one source; return its client, and which examples the second one has."""
    # One name alone can be the folder of a prepared data set.
    named = files[0] if len(files) == 1 else files
    splits = {} if heldout_split is None else dict.fromkeys(["train", heldout_split])
    sources = [_load(named, options._replace(split=split)) for split in splits or [None]]
    client = sources[0].client
    if client is None and one_client is None:
        others = [name for name in sources[0].fields if name != options.label]
        raise ArgumentError(
            f"data.files={' '.join(files)} is one table without clients, expected the column "
            "that names an example's client. Set --data.client to one of "
            f"{', '.join(map(repr, others))}, or name several files, such as "
            "--data.files='FOLDER/*.csv', of which each is a client."
        )
    import pyarrow as pa

    from fedpax.user_files.read_table import join_splits
    from fedpax.user_files.table_source import TableSource

    tables = [source.stored for source in sources]
    of_heldout = np.repeat(np.arange(len(tables)) == 1, [table.num_rows for table in tables])
    with _in_flags():
        table = (
            join_splits(dict(zip(map(str, splits), tables, strict=True)))
            if len(tables) > 1
            else tables[0]
        )
    if client is None:
        one = pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int32), [one_client])
        table = table.append_column("client", one)
    notes = [note for source in sources for note in source.notes]
    source = TableSource(sources[0].name, sources[0].folder, table, notes=notes)
    return source, client or "client", of_heldout
