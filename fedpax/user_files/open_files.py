"""open_files: the files that patterns name as one source, sorted by client."""

import functools
import logging
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedpax.console import count_of
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import host_array
from fedpax.user_files.arrow_numpy import (
    array_to_arrow,
    check_client_numbers,
    check_client_type,
    encode_values,
    is_pandas_index,
    join_zeros,
    plain_types,
)
from fedpax.user_files.file_sizes import check_copy, check_memory
from fedpax.user_files.finding import CLIENT
from fedpax.user_files.formats import LoadOptions, ReadOptions
from fedpax.user_files.held_out import add_partition, check_any, part_of_split, partition_prepared
from fedpax.user_files.image_hashes import is_hash
from fedpax.user_files.prepared import open_prepared, prepared_folder
from fedpax.user_files.read_table import check_resized, conform, read_table, unify
from fedpax.user_files.readers.image_files import decode_features, describe_read
from fedpax.user_files.selection import (
    Selection,
    add_path_columns,
    check_split,
    path_fields,
    select_files,
    wanted_columns,
)
from fedpax.user_files.table_source import ClientNames, TableSource, check_columns

_PLACE = "place in its file"  # of an example, in an error


def open_files(files: Any, options: LoadOptions) -> TableSource:
    """Open files, a prepared folder or a table as a source; see `fedpax.data.load`."""
    if isinstance(files, list | tuple) and len(files) == 1:
        files = files[0]
    if isinstance(files, str | os.PathLike) and (folder := prepared_folder(files, options.split)):
        source = open_in_order(folder, options)
        if options.partition is None:
            return source
        check_copy(source.name, source.table.nbytes)
        return sort_by_client(source.name, folder, source.stored, source.client, source.label)
    if isinstance(files, Mapping) and any(map(_is_data_set, files.values())):
        if options.split not in files:
            raise ArgumentError(
                f"The data sets are the splits {', '.join(map(str, files))}, but split is "
                f"{options.split!r}, expected one of them. Give one, such as "
                f"split={next(iter(files))!r}."
            )
        files, options = files[options.split], options._replace(split=None)
    read = Counter[str]()
    if (table := memory_table(files, options, read)) is not None:
        check_split("the table", options)
        source = _make_source("the table", Path(), table, options, options.client)
    else:
        selected = select_files(files, options, read)
        table, client = _read(selected, options)
        if selected.names_split:
            options = options._replace(heldout_fraction=0.0)
        folder = Path(selected.groups[0][0].path).parent
        source = _make_source(selected.name, folder, table, options, client)
        source.locate = functools.partial(_locate, selected, folder, options)
    source.notes = tuple(describe_read(read))
    return source


def open_in_order(folder: Path, options: LoadOptions) -> TableSource:
    """Open a prepared folder in its own order, memory-mapped; a partition adds its clients."""
    client = options.client
    source = open_prepared(folder, options.label)
    check_columns(source.fields, {"client": client, "label": options.label}, str(folder))
    if client not in (None, source.client):
        raise ArgumentError(
            f"{folder} is sorted by the client {source.client!r}, and client is {client!r}. Leave "
            f"client out, or prepare the files again with client={client!r}."
        )
    _check_texts(str(folder), source.table, options)
    check_resized(str(folder), source.table.schema, options)
    if options.heldout_fraction:
        raise ArgumentError(
            f"heldout_fraction={options.heldout_fraction} would copy the folder {folder}, expected "
            "0. Prepare each split in a folder of its own: `fedpax prepare FILES --out=data/train "
            "--split=train --heldout_fraction=0.1`, and the same for heldout."
        )
    if options.partition is not None:
        source = partition_prepared(source, options)
    return source.select(options.columns) if options.columns else source


def _locate(selected: Selection, folder: Path, options: LoadOptions, number: int) -> str:
    """Name an example by its place in its file, which is read again."""
    table, client = _read(selected, options, numbered=True)
    source = _make_source(selected.name, folder, table, options, client)
    return str(source.table.column(_PLACE)[number])


def _read(
    selected: Selection, options: LoadOptions, *, numbered: bool = False
) -> tuple[pa.Table, str | None]:
    """Read files as one table; return it with the column of clients, which paths can name."""
    name, groups = selected.name, selected.groups
    if not options.columns:
        check_memory(name, groups)
    tables = [read_table(group, selected.options) for group in groups]
    for group, table in zip(groups, tables, strict=True):
        if not table.num_rows and len(groups) > 1:
            logging.getLogger(__name__).warning("%s has no examples.", group[0].path)
    # With a partition, a file is not a client.
    client = options.client if options.partition is None else options.client or CLIENT
    fields, in_path = path_fields(groups, [table.schema for table in tables], client)
    path_types = selected.path_types
    tables = [add_path_columns(*pair, path_types) for pair in zip(tables, fields, strict=True)]
    schemas = [table.schema for table in tables]
    schema = unify([g[0] for g in groups], schemas, options.optional_columns, fields[0][0])
    check_columns(schema.names, wanted_columns(options), name)
    kept = [name for name in schema.names if name not in selected.unwanted]
    tables = [conform(table, schema).select(kept) for table in tables]
    for group, part in zip(groups, tables, strict=True):
        _check_texts(group[0].path, part, options)
    if numbered:
        places = [
            [f"{k} of {g[0].path}" for k in range(len(t))]
            for g, t in zip(groups, tables, strict=True)
        ]
        tables = [t.append_column(_PLACE, [p]) for t, p in zip(tables, places, strict=True)]
    table = pa.concat_tables(tables).unify_dictionaries()
    if options.client is not None and options.client in schema.names:
        for group, part in zip(groups, tables, strict=True):
            if options.client in part.column_names:
                _check_none_misses(group[0].path, part, options.client)
    if not table.num_rows:
        raise ArgumentError(f"{name} has no examples, expected at least one. Name other files.")
    return table, in_path if options.partition is None else options.client


def _make_source(
    name: str, folder: Path, table: pa.Table, options: LoadOptions, client: str | None
) -> TableSource:
    added = [_PLACE]
    if options.partition is not None:
        table, client = add_partition(table, options), CLIENT
        added += [CLIENT]
    check_columns(table.column_names, {"client": client, "label": options.label}, name)
    check_resized(name, table.schema, options)
    table = part_of_split(name, table, options, client, added)
    check_any(name, table, options)
    return sort_by_client(name, folder, table, client, options.label)


def sort_by_client(
    name: str, folder: Path, table: pa.Table, client: str | None, label: str | None
) -> TableSource:
    """Make a source of a table, stably sorted by the client's name, if there is such a column."""
    if client is None:
        return TableSource(name, folder, table, label=label)
    _check_none_misses(name, table, client)
    table = join_zeros(table, client)
    column = table.column(client)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    check_client_type(column.type, client, name)
    check_client_numbers(column, client, name)
    names, owner = encode_values(column)
    if (owner[1:] < owner[:-1]).any():
        table = _wide_texts(table).take(pa.array(np.argsort(owner, kind="stable")))
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(names)))])
    client_names = ClientNames(names)
    if len(names) and client_names[0] == "":
        logging.getLogger(__name__).warning(
            f"The column {client!r} of {name} is the empty text in "
            f"{count_of(int(starts[1]), 'example')}, which are one client, ''. Fill the values in, "
            "or leave these rows out."
        )
    return TableSource(
        name,
        folder,
        table,
        client=client,
        client_starts=starts.astype(np.int64),
        client_names=client_names,
        label=label,
    )


def _check_none_misses(
    name: str, table: pa.Table, column: str, expected: str = "the client"
) -> None:
    """Raise an error for an example without a client, or without another value."""
    missing = np.asarray(pc.is_null(table.column(column), nan_is_null=True))
    if missing.any():
        raise ArgumentError(
            f"The column {column!r} of {name} has no value in "
            f"{count_of(int(missing.sum()), 'example')}, such as example "
            f"{int(np.argmax(missing))}, counted from 0, expected {expected} of each example. "
            "Fill the values in, or leave these rows out."
        )


def _check_texts(name: str, table: pa.Table, options: LoadOptions) -> None:
    """Check that the columns of a language model exist, without missing values."""
    for flag, column in (options.texts or {}).items():
        if column in table.column_names:
            if table.column(column).null_count:
                _check_none_misses(name, table, column, "the text")
            continue
        is_text = (pa.types.is_string, pa.types.is_large_string)
        texts = [f.name for f in table.schema if any(check(f.type) for check in is_text)]
        others = " or ".join(f"{flag}{shlex.quote(text)}" for text in texts[:5])
        raise ArgumentError(
            f"{name} has no column {column!r}, but {', '.join(map(repr, table.column_names))}. "
            f"Name the column with the text{f': {others}' if others else ''}."
        )


def _wide_texts(table: pa.Table) -> pa.Table:
    """Give texts offsets of 64 bits where a column has more than 2 GB."""
    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    fields = [
        field.with_type(wide[field.type])
        if field.type in wide and table.column(field.name).nbytes >= 2**31
        else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def memory_table(data: Any, options: LoadOptions, read: Counter[str]) -> pa.Table | None:
    """Return a table that is in memory, or None if `data` is something else, such as paths."""
    if isinstance(data, Mapping):
        table = pa.table({name: _to_arrow(name, values) for name, values in data.items()})
    elif _is_data_set(data):
        table = pa.table(data.with_format("arrow")[:])
    elif hasattr(data, "__arrow_c_stream__"):
        table = pa.table(data)
    else:
        return None
    names = table.column_names
    if twice := [name for name in names if names.count(name) > 1]:
        raise ArgumentError(
            f"The table has several columns named {twice[0]!r}, expected different names. Rename "
            "them."
        )
    columns = tuple(options.columns)
    if missing := [name for name in columns if name not in table.column_names]:
        raise ArgumentError(
            f"columns has {missing[0]!r}, expected names among "
            f"{', '.join(map(repr, table.column_names))}."
        )
    if not table.num_rows:
        raise ArgumentError("The table has no examples, expected at least one. Pass another one.")
    how = ReadOptions(columns, {}, None, options.image_size, image=options.image, read=read)
    table = plain_types(decode_features(table, how))
    chosen = columns or [n for n in names if not is_pandas_index(n)]
    table = table.select([*chosen, *filter(is_hash, table.column_names)])
    return table.replace_schema_metadata(None)


def _is_data_set(data: Any) -> bool:
    """Return whether `data` is a data set of Hugging Face."""
    return all(hasattr(data, name) for name in ("with_format", "features", "__getitem__"))


def _to_arrow(name: str, values: Any) -> Any:
    """Convert the values of a column, one for each example."""
    try:
        if isinstance(values, np.ma.MaskedArray) and values.ndim == 1:
            return pa.array(values.data, mask=np.ma.getmaskarray(values))
        if isinstance(values, Mapping | str | bytes) or not hasattr(values, "__len__"):
            raise ArgumentTypeError("it is not one value for each example")
        is_array = isinstance(values, np.ndarray)
        return array_to_arrow(host_array(values, "it")) if is_array else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        text = str(error).rstrip(".")
        raise ArgumentError(
            f"The column {name!r}, of type {type(values).__name__}, cannot be read: {text}. Pass "
            "an array [examples, ...], or a list with one value for each example."
        ) from error
