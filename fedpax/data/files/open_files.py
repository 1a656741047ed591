"""open_files: the files that patterns name as one source, sorted by client."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool

from fedpax.data.files.finding import CLIENT, DataFile, find_files, is_url
from fedpax.data.files.folders import find_in_folder
from fedpax.data.files.formats import ReadOptions, is_image
from fedpax.data.files.held_out import held_out
from fedpax.data.files.own_clients import has_own_clients
from fedpax.data.files.read_table import read_table
from fedpax.data.files.table_source import ClientNames, TableSource, check_columns
from fedpax.errors import ArgumentError
from fedpax.paths import expand_home

HELD_OUT_SPLITS = ("heldout", "test", "validation")
"""Names of the split that `heldout_fraction` makes."""


def open_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    split: str | None = None,
    client: str | None = None,
    label: str | None = None,
    columns: Sequence[str] = (),
    types: Mapping[str, str] | None = None,
    delimiter: str | None = None,
    image_size: tuple[int, int] | None = None,
    heldout_fraction: float = 0.0,
    heldout_by: str = "example",
) -> TableSource:
    """Open files as a source; see `fedpax.data.load`, which passes its arguments."""
    if isinstance(files, str | os.PathLike):
        files = [files]
    patterns = [os.fspath(file) for file in files]
    name = ",".join(patterns)
    found, names_split = _find(patterns, split, heldout_fraction)
    in_path = {field for file in found for field in file.fields}
    kept = [c for c in (client, label) if c is not None and c not in in_path]
    options = ReadOptions(
        tuple(dict.fromkeys([*columns, *kept])) if columns else (),
        _arrow_types(types),
        delimiter,
        image_size,
    )
    groups = _group(found)
    tables = [read_table(group, options) for group in groups]
    tables, client = _add_path_columns(groups, tables, client)
    found = [group[0] for group in groups]
    table = _concatenate(found, tables)
    if not table.num_rows:
        raise ArgumentError(f"{name} has no examples, expected at least one. Name other files.")
    check_columns(table.column_names, {"client": client, "label": label}, name)
    if not 0 <= heldout_fraction < 1:
        raise ArgumentError(
            f"heldout_fraction is {heldout_fraction}, expected a share from 0 to below 1, such as "
            "0.1."
        )
    if heldout_fraction and split is not None and not names_split:
        is_held_out = _held_out(name, table, heldout_fraction, heldout_by, client)
        table = table.filter(pa.array(is_held_out == _is_held_out_split(split)))
        if not table.num_rows:
            raise ArgumentError(
                f"The split {split!r} of {name} has no examples with heldout_fraction="
                f"{heldout_fraction}, expected at least one. Set another fraction."
            )
    elif split is not None and not names_split and split != "train":
        raise ArgumentError(
            f"{name} has no split {split!r}. Write {{split}} in the path, such as "
            "'data/{split}/*.csv', or hold out a share of the examples with heldout_fraction=0.1."
        )
    return sort_by_client(name, Path(found[0].path).parent, table, client, label)


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


def _is_held_out_split(split: str) -> bool:
    if split != "train" and split not in HELD_OUT_SPLITS:
        raise ArgumentError(
            f"split is {split!r}, expected 'train', or one of {', '.join(HELD_OUT_SPLITS)} for the "
            "examples that heldout_fraction holds out."
        )
    return split != "train"


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


def _arrow_types(types: Mapping[str, str] | None) -> dict[str, pa.DataType]:
    found = {}
    for column, text in (types or {}).items():
        try:
            found[column] = pa.type_for_alias(text)
        except ValueError:
            raise ArgumentError(
                f"types: {text!r} of column {column!r} is no type of Arrow, expected one such as "
                "string, int64, float32, bool, date32 or timestamp[s]."
            ) from None
    return found


def _find(
    patterns: Sequence[str], split: str | None, heldout_fraction: float
) -> tuple[list[DataFile], bool]:
    """Return the files of a split, and whether paths or folders name the splits."""
    folders = [p for p in patterns if not is_url(p) and expand_home(p).is_dir()]
    if not folders:
        names_split = any("{split}" in pattern for pattern in patterns)
        return find_files(patterns, split), names_split
    if len(patterns) > 1:
        raise ArgumentError(
            f"{folders[0]} is a folder, expected one folder or several files. Name its files, such "
            f"as '{folders[0]}/*.parquet'."
        )
    folder = expand_home(folders[0])
    if heldout_fraction and split in HELD_OUT_SPLITS:
        with contextlib.suppress(ValueError):  # the folder has no such split
            return find_in_folder(folder, split)
        split = "train"
    found, names_split = find_in_folder(folder, split)
    return found, names_split and not heldout_fraction


def _group(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Put images together, which are read in parallel; every other file is alone."""
    if all(is_image(file) for file in files):
        return [list(files)]
    return [[file] for file in files]


def _add_path_columns(
    groups: Sequence[Sequence[DataFile]], tables: Sequence[pa.Table], client: str | None
) -> tuple[list[pa.Table], str | None]:
    """Add the columns that paths name; return the tables and the column of clients."""
    first = groups[0][0]
    if any(has_own_clients(table.schema) for table in tables) or CLIENT in first.fields:
        client = client or CLIENT
    paths = [[dict(file.fields) for file in group] for group in groups]
    if client is None and len(groups) > 1 and not first.is_shard:
        taken = {column for table in tables for column in table.column_names}
        if CLIENT in taken:
            raise ArgumentError(
                "Each of several files is a client unless client= names a column, but these files "
                f"have a column {CLIENT!r}. Set client={CLIENT!r} if it names the clients; "
                "otherwise leave it out with columns=."
            )
        client = CLIENT
        for (fields,), own in zip(paths, _client_names([g[0] for g in groups]), strict=True):
            fields[CLIENT] = own
    added = []
    for group, table, fields in zip(groups, tables, paths, strict=True):
        for name in fields[0]:
            if name in table.column_names:
                raise ArgumentError(
                    f"{group[0].path} has a column {name!r}, and its path has {{{name}}} too, "
                    "expected one of them. Write * in the path, or leave the column out with "
                    "columns=."
                )
            texts = pa.array([own[name] for own in fields]).dictionary_encode()
            if len(group) == 1:
                texts = texts.take(pa.array(np.zeros(table.num_rows, np.int32)))
            table = table.append_column(name, texts)
        added.append(table)
    return added, client


def _client_names(files: Sequence[DataFile]) -> list[str]:
    """Name clients after their files; with the folders that tell equal names apart."""
    names = [file.name for file in files]
    if len({*names}) == len(names):
        return names
    shared = os.path.commonpath([os.path.dirname(file.path) for file in files])
    paths = [PurePosixPath(os.path.relpath(file.path, shared)) for file in files]
    return [path.with_name(name).as_posix() for path, name in zip(paths, names, strict=True)]


def _concatenate(files: Sequence[DataFile], tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate the tables of files, which have the same columns.

    Raises:
        ValueError: a file lacks a column, or has another type in it.
    """
    first = tables[0]
    for file, table in zip(files, tables, strict=True):
        if different := {*table.column_names} ^ {*first.column_names}:
            column = sorted(different)[0]
            lacks, has = (file, files[0]) if column in first.column_names else (files[0], file)
            raise ArgumentError(
                f"{lacks.path} has no column {column!r}, which {has.path} has, expected the same "
                "columns in all files. Add the column, or name common columns with columns=, such "
                f"as {', '.join(repr(c) for c in first.column_names if c in table.column_names)}."
            )
    tables = [table.select(first.column_names) for table in tables]
    schema = first.schema.remove_metadata()
    for file, table in zip(files, tables, strict=True):
        schema = _unify(schema, table.schema.remove_metadata(), files[0], file)
    return pa.concat_tables([table.cast(schema) for table in tables]).unify_dictionaries()


def _unify(one: pa.Schema, two: pa.Schema, first: DataFile, file: DataFile) -> pa.Schema:
    fields = []
    for a, b in zip(one, two, strict=True):
        try:
            joined = pa.unify_schemas(
                [pa.schema([pa.field(f.name, f.type)]) for f in (a, b)],
                promote_options="permissive",
            )
        except pa.ArrowException:
            raise ArgumentError(
                f"The column {a.name!r} is {a.type} in {first.path} and {b.type} in {file.path}, "
                f"expected one type. Correct the values, or set types={{{a.name!r}: 'string'}}."
            ) from None
        fields.append(joined.field(0))
    return pa.schema(fields)
