"""Users' files as clients: the examples, their clients, and which of them are held out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from fedpax.checks import CheckedConfig, Decay
from fedpax.console import count_of
from fedpax.data import load
from fedpax.data.loading import load_with
from fedpax.data.tables.labels import Label, missing_label_message
from fedpax.data.tables.values import is_missing
from fedpax.errors import ArgumentError, FedpaxError
from fedpax.extras import optional
from fedpax.settings.file_remedies import with_flags
from fedpax.settings.function_settings import accepted
from fedpax.user_files.formats import LoadOptions, parse_types

_BLOCK_BYTES = 1 << 23


class PreparedFiles(Protocol):
    """Examples as arrays, and their label."""

    @property
    def examples(self) -> Any:
        """All examples, for `cohort_rounds`: arrays `[examples, ...]`, or a source of them."""
        ...

    @property
    def labels(self) -> NDArray[Any]:
        """The labels of all examples."""
        ...

    def read(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the fields of some examples, with `label`, by their numbers or a mask."""
        ...

    @property
    def label(self) -> Label:
        """The label that the model predicts."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Lines that are printed when a run starts."""
        ...

    @property
    def cautions(self) -> Sequence[str]:
        """Lines on values that are filled, which an evaluation prints too."""
        ...


@dataclasses.dataclass(frozen=True)
class FilesConfig(CheckedConfig):
    """Files whose examples have clients and labels.

    Attributes:
        files: paths and patterns, as for `fedpax.data.load`, such as "hospitals/*.csv". With
            `{split}` in the path, the split "train" is trained on.
        client: the column that names an example's client. Default None: `{client}` in the path, or
            each file is a client.
        partition: clients for files that have none, such as "dirichlet:0.3:100", as for
            `fedpax.data.load`.
        label: the column to predict.
        missing_label: what examples without a label are: an "error", or left out, "skip".
        heldout_fraction: share of each client's examples that is held out, chosen by a hash of the
            example.
        heldout_clients: share of the clients that are held out with all their examples, chosen by a
            hash of the name.
        heldout_split: the split to evaluate on if `files` has `{split}`; `heldout_fraction` then
            has no effect.
        optional_columns: columns that some of the files lack; their values are missing there. On
            the command line, commas or spaces separate them, and a comma in a name follows a
            backslash.
        types: types of Arrow for columns of files, as "COLUMN=TYPE", such as "zip=string", where
            the type that is found is not the intended one, separated as `optional_columns` are.
    """

    group = "data"
    files: tuple[str, ...] = ()
    client: str | None = None
    partition: str | None = None
    label: str | None = None
    missing_label: Literal["error", "skip"] = "error"
    heldout_fraction: Decay = 0.2
    heldout_clients: Decay = 0.0
    heldout_split: str = "test"
    optional_columns: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges and the types."""
        super().__post_init__()
        parse_types("--data.types", self.types)

    def load_arguments(self) -> dict[str, Any]:
        """Return the arguments of `fedpax.data.load` beside the files and the split."""
        # These have other meanings in `load`: all examples, and the columns that are read.
        fields = {k: v for k, v in vars(self).items() if k not in ("heldout_fraction", "columns")}
        own = {"types": parse_types("--data.types", self.types), "image": fields.get("image")}
        return accepted(load, fields) | own


class StoredColumns(Mapping[str, Any]):
    """Columns of examples sorted by client, Arrow arrays; a column is read when it is indexed.

    Args:
        source: the files.
        rows: the place in `source` of each example. None: the same.
        optional: columns whose values are all missing if no file has them.
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
    client: str  # the column of clients
    names: Sequence[str]  # the clients' names
    owners: Int[np.ndarray, " examples"]  # the client of each example
    heldout: Bool[np.ndarray, " examples"]  # whether an example of a training client is held out
    is_new: Bool[np.ndarray, " clients"]  # whether a client is held out with all its examples
    notes: tuple[str, ...]  # lines that tell what was read

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


def describe_measured(data: FilesConfig, opened: OpenFiles) -> str:
    """Return how many of the examples an evaluation measures, and how to measure more."""
    held_out, count = int((~opened.training).sum()), len(opened.owners)
    words = f"measured {held_out:,} of {count:,} examples: the held-out part"
    if any("{split}" in file for file in data.files):
        return words
    most = _most_heldout(data, opened)
    if most is None or most <= data.heldout_fraction:
        return words
    return f"{words}; on these files, --data.heldout_fraction={most:g} measures the most"


def _most_heldout(data: FilesConfig, opened: OpenFiles) -> float | None:
    """Return the largest of some fractions that leaves an example to train on, as a run needs."""
    if len(opened.owners) > 10_000:
        return 0.99
    from fedpax.user_files.held_out import held_out

    table, rows = opened.columns.stored, opened.columns.rows
    content = table if data.partition is None else table.drop_columns([opened.client])
    for fraction in (0.99, 0.9, 0.8, 0.5):
        chosen = held_out(content, fraction)
        chosen = chosen if rows is None else chosen[rows]
        if not chosen[~opened.is_new[opened.owners]].all():
            return fraction
    return None


def open_files(data: FilesConfig, one_client: str | None = None) -> OpenFiles:
    """Read files, and decide which examples are held out.

    Args:
        data: the files.
        one_client: name of the client of one file that has no clients. Default None: raise.
    """
    if not data.files or data.label is None:
        raise ArgumentError(
            f"data.files={data.files} and data.label={data.label}, expected files and the column "
            "to predict. Set for example --data.files='hospitals/*.csv' --data.label=outcome."
        )
    has_split = any("{split}" in file for file in data.files)
    if has_split and data.partition is not None:
        raise ArgumentError(
            f"data.partition={data.partition!r} divides the examples of one split, but data.files "
            "has {split}. Name all files with *, and hold out with --data.heldout_fraction."
        )
    splits = ["train", data.heldout_split] if has_split else [None]
    # One name alone can be the folder of a prepared data set.
    files = data.files[0] if len(data.files) == 1 else data.files
    sources = [_load(data, files, split) for split in splits]
    client = sources[0].client
    if client is None and one_client is None:
        others = [name for name in sources[0].fields if name != data.label]
        raise ArgumentError(
            f"data.files={' '.join(data.files)} is one table without clients, expected the column "
            "that names an example's client. Set --data.client to one of "
            f"{', '.join(map(repr, others))}, or name several files, such as "
            "--data.files='FOLDER/*.csv', of which each is a client."
        )
    source, of_heldout = _join(sources, client, one_client)
    client = client or "client"
    rows: Any = None
    skipped = is_missing(source.table.column(data.label))
    if skipped.any():
        if data.missing_label == "error":
            first = source.table.column(client)[int(np.argmax(skipped))].as_py()
            whose = f" of {client} {first!r}"
            raise ArgumentError(missing_label_message(data.label, skipped, whose))
        rows = np.flatnonzero(~skipped)
    in_order = data.partition is not None  # the examples need not be sorted by client
    names, owners = _clients(source.table.column(client), rows, in_order=in_order)
    # Sorted by client again: the held-out split followed the training split.
    if (owners[1:] < owners[:-1]).any():
        order = np.argsort(owners, kind="stable")
        rows, owners = order if rows is None else rows[order], owners[order]
    heldout, is_new = _held_out(data, source.stored, client, names, rows, owners, of_heldout)
    parts = [f"{int(heldout.sum()):,} held out within clients"]
    if is_new.any():
        new = count_of(int(is_new.sum()), "held-out client")
        parts.append(f"{int(is_new[owners].sum()):,} of {new}")
    sizes = f"{count_of(len(names), 'client')}, {count_of(len(owners), 'example')}"
    notes = [f"{sizes}: {', '.join(parts)}"]
    if skipped.any():
        notes.append(f"left out: {count_of(int(skipped.sum()), 'example')} without {data.label!r}")
    notes += source.notes
    return OpenFiles(
        StoredColumns(source, rows, data.optional_columns),
        client,
        names,
        owners,
        heldout,
        is_new,
        tuple(notes),
    )


def _load(data: FilesConfig, files: Any, split: str | None) -> Any:
    """Open a split; a prepared folder stays in its own order, whatever a partition makes of it."""
    with optional(f"Reading {files!r}"):
        from fedpax.user_files.open_files import open_in_order
        from fedpax.user_files.prepared import prepared_folder

    arguments = data.load_arguments()
    try:
        if isinstance(files, str) and (folder := prepared_folder(files, split)) is not None:
            return open_in_order(folder, LoadOptions.of(arguments))
        return load_with(files, LoadOptions.of(arguments | {"split": split}))
    except FedpaxError as error:
        error.in_flags = with_flags(str(error))
        raise


def _join(
    sources: Sequence[Any], client: str | None, one_client: str | None
) -> tuple[Any, Bool[np.ndarray, " examples"]]:
    """Concatenate the tables of the splits, and tell the examples of the second one."""
    import pyarrow as pa

    from fedpax.user_files.table_source import TableSource

    tables = [source.stored for source in sources]
    of_heldout = np.repeat(np.arange(len(tables)) == 1, [table.num_rows for table in tables])
    table = tables[0]
    if len(tables) > 1:
        table = pa.concat_tables(tables, promote_options="permissive")
    if client is None:
        one = pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int32), [one_client])
        table = table.append_column("client", one)
    notes = [note for source in sources for note in source.notes]
    return TableSource(sources[0].name, sources[0].folder, table, notes=notes), of_heldout


def _clients(
    column: Any, rows: Int[np.ndarray, " examples"] | None, *, in_order: bool
) -> tuple[list[str], Int[np.ndarray, " examples"]]:
    """Return the names of the clients of some rows, and the client of each of these rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from fedpax.user_files.table_source import ClientNames

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    encoded = column.dictionary_encode().unify_dictionaries()
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
    codes = codes if rows is None else codes[rows]
    all_names = encoded.chunk(0).dictionary
    if in_order:
        by_name = pc.array_sort_indices(all_names)
        all_names, codes = all_names.take(by_name), np.argsort(by_name.to_numpy())[codes]
    has_rows = np.bincount(codes, minlength=len(all_names)) > 0
    names = ClientNames(all_names.filter(pa.array(has_rows)))
    return [str(name) for name in names], (np.cumsum(has_rows) - 1)[codes]


def _held_out(
    data: FilesConfig,
    table: Any,
    client: str,
    names: Sequence[str],
    rows: Int[np.ndarray, " examples"] | None,
    owners: Int[np.ndarray, " examples"],
    of_heldout: Bool[np.ndarray, " rows"],
) -> tuple[Bool[np.ndarray, " examples"], Bool[np.ndarray, " clients"]]:
    """Return which examples of training clients, and which clients, are held out."""
    from fedpax.user_files.held_out import held_out

    # Clients that a partition made are no content: equal examples are on one side.
    content = table if data.partition is None else table.drop_columns([client])
    has_split = any("{split}" in file for file in data.files)
    chosen = of_heldout if has_split else held_out(content, data.heldout_fraction)
    of_clients = held_out(table.select([client]), data.heldout_clients)
    if rows is not None:
        chosen, of_clients = chosen[rows], of_clients[rows]
    is_new = np.zeros(len(names), np.bool_)
    is_new[owners[of_clients]] = True
    if is_new.all():
        raise ArgumentError(
            f"data.heldout_clients={data.heldout_clients} holds out all "
            f"{count_of(len(names), 'client')}, expected some to train on. "
            "Set a smaller --data.heldout_clients."
        )
    heldout = chosen & ~is_new[owners]
    if not heldout.any() and not is_new.any():
        raise ArgumentError(
            f"data.heldout_fraction={data.heldout_fraction} holds out none of {len(owners)} "
            "examples, expected some to evaluate on. Set a larger --data.heldout_fraction or "
            "--data.heldout_clients."
        )
    return heldout, is_new
