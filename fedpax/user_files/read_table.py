"""read_table and stream_tables: a file as Arrow tables, with checked columns."""

import contextlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.user_files.columns import plain_types
from fedpax.user_files.finding import CLIENT, DataFile
from fedpax.user_files.formats import (
    ReadOptions,
    describe_contents,
    find_reader,
    find_stream,
    is_image,
    varies,
)
from fedpax.user_files.readers.image_files import decode_features


def read_table(files: Sequence[DataFile], options: ReadOptions) -> pa.Table:
    """Read one file, or several images, each an example."""
    reader = find_reader(files[0])
    with _named(files[0]):
        table = reader(files if is_image(files[0]) else files[0], options)
        table = plain_types(decode_features(table, options))
    return _check_columns(files[0], table, options)


def stream_tables(files: Sequence[DataFile], options: ReadOptions) -> Iterator[pa.Table]:
    """Read one file in parts, or several images."""
    stream = find_stream(files[0])
    if stream is None:
        yield read_table(files, options)
        return
    parts = iter(stream(files[0], options))
    is_empty = True
    while True:
        with _named(files[0]):
            table = next(parts, None)
            if table is None:
                break
            table = plain_types(decode_features(table, options))
        is_empty = False
        yield _check_columns(files[0], table, options)
    if is_empty:  # no examples, but columns
        yield read_table(files, options)


@contextlib.contextmanager
def _named(file: DataFile) -> Iterator[None]:
    """Name the file in errors of the libraries that parse it."""
    try:
        yield
    except UnicodeEncodeError as error:  # of the path: the libraries take names in UTF-8
        raise ArgumentError(
            f"{file.path} has a name that is not UTF-8, expected one in UTF-8. Rename the file or "
            "its folder; where all names are UTF-8, set the environment variable PYTHONUTF8=1."
        ) from error
    except (pa.ArrowException, EOFError, MemoryError, OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        if not is_image(file) and (told := describe_contents(file)):
            raise ArgumentError(told) from error
        text = " ".join(str(error).split()).rstrip(".") or "a size in it exceeds the memory"
        what = "" if is_image(file) else f"{file.path} cannot be read as {file.suffix[1:]}: "
        raise ArgumentError(f"{what}{text}.") from error


def _check_columns(file: DataFile, table: pa.Table, options: ReadOptions) -> pa.Table:
    """Select the columns, and give them the types that were asked for."""
    names: Sequence[str] = table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        remedy = "Rename them in the file."
        if not twice[0]:
            remedy = "Name the columns in its first line, and remove a title above the names."
        raise ArgumentError(
            f"{file.path} has several columns named {twice[0]!r}, expected different names. "
            f"{remedy}"
        )
    needed = [*options.columns, *options.types] if not varies(file) else []
    if missing := [name for name in needed if name not in (*names, *options.optional)]:
        raise ArgumentError(
            f"{file.path} has no column {missing[0]!r}, expected one of "
            f"{', '.join(map(repr, names))}. Name one of these, or give "
            f"optional_columns=[{missing[0]!r}] if other files have it."
        )
    wanted = [c for c in options.columns if c in names] if options.columns else names
    if has_own_clients(table.schema) and CLIENT not in wanted:
        wanted = [*wanted, CLIENT]
    table = table.select(wanted)
    for name, data_type in options.types.items():
        column = table.column(name) if name in table.column_names else None
        if column is not None:
            try:
                cast = column.cast(_type_of_values(column.type, data_type))
            except pa.ArrowException as error:
                raise ArgumentError(
                    f"types: column {name!r} of {file.path} is {column.type} and cannot become "
                    f"{data_type}: {error}."
                ) from error
            table = table.set_column(table.column_names.index(name), name, cast)
    return table


def _type_of_values(kind: pa.DataType, values: pa.DataType) -> pa.DataType:
    """Return the type of a column of values; the values of a list have the type."""
    if pa.types.is_large_list(kind):
        return pa.large_list(_type_of_values(kind.value_type, values))
    if pa.types.is_list(kind):
        return pa.list_(_type_of_values(kind.value_type, values))
    return values


# add_clients: the column of clients in formats that group examples by client themselves.
_MARK = {b"fedpax": b"client"}  # in the field's metadata, to tell it from a column of the user


def add_clients(table: pa.Table, clients: Sequence[str]) -> pa.Table:
    """Add the name of each example's client to a table."""
    if CLIENT in table.column_names:
        raise ArgumentError(
            f"its clients have a field {CLIENT!r}, which is the column of their names. Rename it"
        )
    names = pa.array(clients, pa.string()).dictionary_encode()
    table = table.append_column(CLIENT, names)
    return table.cast(mark_clients(table.schema))


def mark_clients(schema: pa.Schema) -> pa.Schema:
    """Mark the column of clients as one that `add_clients` has added."""
    place = schema.get_field_index(CLIENT)
    return schema.set(place, schema.field(place).with_metadata(_MARK))


def has_own_clients(schema: pa.Schema) -> bool:
    """Return whether `add_clients` has added the clients."""
    return CLIENT in schema.names and schema.field(CLIENT).metadata == _MARK
