"""read_table: one file as an Arrow table, with checked columns."""

from collections.abc import Sequence

import pyarrow as pa

from fedpax.data.files.finding import DataFile
from fedpax.data.files.formats import ReadOptions, find_reader
from fedpax.errors import ArgumentError


def read_table(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read one file.

    Raises:
        ValueError: its format is unknown, it is damaged, or columns are missing or named twice.
    """
    reader = find_reader(file)
    try:
        table = reader(file, options)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        text = " ".join(str(error).split()).rstrip(".")
        raise ArgumentError(f"{file.path} cannot be read as {file.suffix[1:]}: {text}.") from error
    return _check_columns(file, table, options)


def _check_columns(file: DataFile, table: pa.Table, options: ReadOptions) -> pa.Table:
    """Select the columns, and give them the types that were asked for."""
    names: Sequence[str] = table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ArgumentError(
            f"{file.path} has several columns named {twice[0]!r}, expected different names. Rename "
            "them in the file."
        )
    if missing := [name for name in (*options.columns, *options.types) if name not in names]:
        raise ArgumentError(
            f"{file.path} has no column {missing[0]!r}, expected one of "
            f"{', '.join(map(repr, names))}."
        )
    table = table.select(list(options.columns) or names)
    for name, kind in options.types.items():
        column = table.column(name) if name in table.column_names else None
        if column is not None and column.type != kind:
            try:
                cast = column.cast(kind)
            except pa.ArrowException as error:
                raise ArgumentError(
                    f"types: column {name!r} of {file.path} is {column.type} and cannot become "
                    f"{kind}: {error}."
                ) from error
            table = table.set_column(table.column_names.index(name), name, cast)
    return table
