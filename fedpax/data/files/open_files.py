"""open_files: the files that patterns name as one source, sorted by client."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool

from fedpax.data.files.file_sizes import check_memory
from fedpax.data.files.held_out import held_out
from fedpax.data.files.memory import memory_table
from fedpax.data.files.path_columns import add_path_columns, path_fields
from fedpax.data.files.prepared import open_prepared, prepared_folder
from fedpax.data.files.read_table import read_table
from fedpax.data.files.schemas import conform, unify
from fedpax.data.files.selection import check_split, select_files
from fedpax.data.files.table_source import ClientNames, TableSource, check_columns
from fedpax.errors import ArgumentError


def open_files(
    files: Any,
    *,
    split: str | None = None,
    client: str | None = None,
    label: str | None = None,
    columns: Sequence[str] = (),
    optional_columns: Sequence[str] = (),
    types: Mapping[str, str] | None = None,
    delimiter: str | None = None,
    image_size: tuple[int, int] | None = None,
    heldout_fraction: float = 0.0,
    heldout_by: str = "example",
) -> TableSource:
    """Open files as a source; see `fedpax.data.load`, which passes its arguments."""
    if isinstance(files, str | os.PathLike) and (folder := prepared_folder(files, split)):
        return _open_prepared(folder, client, label, columns)
    if (table := memory_table(files, columns)) is not None:
        check_columns(table.column_names, {"client": client, "label": label}, "the table")
        check_split("the table", split, heldout_fraction)
        table = _held_out_part("the table", table, split, heldout_fraction, heldout_by, client)
        return sort_by_client("the table", Path(), table, client, label)
    selected = select_files(
        files,
        split=split,
        client=client,
        label=label,
        columns=columns,
        types=types,
        delimiter=delimiter,
        image_size=image_size,
        heldout_fraction=heldout_fraction,
    )
    name, groups = selected.name, selected.groups
    if not columns:
        check_memory(name, groups)
    tables = [read_table(group, selected.options) for group in groups]
    fields, client = path_fields(groups, [table.schema for table in tables], client)
    tables = [add_path_columns(*pair) for pair in zip(tables, fields, strict=True)]
    schemas = [table.schema for table in tables]
    schema = unify([group[0] for group in groups], schemas, optional_columns)
    table = pa.concat_tables([conform(table, schema) for table in tables]).unify_dictionaries()
    if not table.num_rows:
        raise ArgumentError(f"{name} has no examples, expected at least one. Name other files.")
    check_columns(table.column_names, {"client": client, "label": label}, name)
    if not selected.names_split:
        table = _held_out_part(name, table, split, heldout_fraction, heldout_by, client)
    return sort_by_client(name, Path(groups[0][0].path).parent, table, client, label)


def _open_prepared(
    folder: Path, client: str | None, label: str | None, columns: Sequence[str]
) -> TableSource:
    source = open_prepared(folder, label)
    check_columns(source.fields, {"client": client, "label": label}, str(folder))
    if client not in (None, source.client):
        raise ArgumentError(
            f"{folder} is sorted by the client {source.client!r}, and client is {client!r}. Leave "
            f"client out, or prepare the files again with client={client!r}."
        )
    return source.select(columns) if columns else source


def _held_out_part(
    name: str, table: pa.Table, split: str | None, fraction: float, by: str, client: str | None
) -> pa.Table:
    """Return the examples of a split that a share of the examples makes."""
    if not fraction or split is None:
        return table
    is_held_out = _held_out(name, table, fraction, by, client)
    part = table.filter(pa.array(is_held_out == (split != "train")))
    if not part.num_rows:
        raise ArgumentError(
            f"The split {split!r} of {name} has no examples with heldout_fraction={fraction}, "
            "expected at least one. Set another fraction."
        )
    return part


def _held_out(
    name: str, table: pa.Table, fraction: float, by: str, client: str | None
) -> Bool[np.ndarray, " examples"]:
    """Return whether each example is held out, by its content or by one column."""
    if by == "client" and client is not None:
        by = client
    if by == "example":
        return held_out(table, fraction)
    if by not in table.column_names:
        raise ArgumentError(
            f"heldout_by={by!r} is no column of {name}, expected 'example', 'client' for files "
            f"with clients, or one of {', '.join(map(repr, table.column_names))}."
        )
    return held_out(table.select([by]), fraction)


def sort_by_client(
    name: str, folder: Path, table: pa.Table, client: str | None, label: str | None
) -> TableSource:
    """Make a source of a table: sorted by the name of the client, if there is such a column.

    The examples of a client keep their order.

    Raises:
        ValueError: a client is missing.
    """
    if client is None:
        return TableSource(name, folder, table, label=label)
    column = table.column(client)
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise ArgumentError(
            f"The column {client!r} of {name} has no value in {column.null_count} examples, such "
            f"as example {row}, expected the client of each example. Fill the values in, or leave "
            "these rows out."
        )
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_nested(column.type):
        raise ArgumentError(
            f"The column {client!r} of {name} has values of type {column.type}, expected texts or "
            "numbers that name a client."
        )
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    names = encoded.dictionary
    by_name = pc.array_sort_indices(names).to_numpy()
    rank = np.empty(len(names), np.int64)
    rank[by_name] = np.arange(len(names))
    owner = rank[encoded.indices.to_numpy()]
    if (owner[1:] < owner[:-1]).any():
        table = _wide_texts(table).take(pa.array(np.argsort(owner, kind="stable")))
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(names)))])
    return TableSource(
        name,
        folder,
        table,
        client=client,
        client_starts=starts.astype(np.int64),
        client_names=ClientNames(names.take(by_name)),
        label=label,
    )


def _wide_texts(table: pa.Table) -> pa.Table:
    """Give texts offsets of 64 bits where a column has more than 2 GB, which 32 cannot count."""
    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    fields = [
        field.with_type(wide[field.type])
        if field.type in wide and table.column(field.name).nbytes >= 2**31
        else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))
