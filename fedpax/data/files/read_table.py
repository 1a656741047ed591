"""read_table: one file as an Arrow table, with checked columns."""

from collections.abc import Sequence

import pyarrow as pa

from fedpax.data.files.finding import CLIENT, DataFile
from fedpax.data.files.formats import ReadOptions, find_reader, is_image
from fedpax.data.files.hugging_face import decode_features
from fedpax.data.files.own_clients import has_own_clients
from fedpax.errors import ArgumentError


def read_table(files: Sequence[DataFile], options: ReadOptions) -> pa.Table:
    """Read one file, or several images, each an example.

    Raises:
        ValueError: the format is unknown, a file is damaged, or columns are missing or named twice.
    """
    file = files[0]
    reader = find_reader(file)
    try:
        if is_image(file):
            table = reader(files, options)
        else:
            table = decode_features(reader(file, options), options)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        text = " ".join(str(error).split()).rstrip(".")
        what = "" if is_image(file) else f"{file.path} cannot be read as {file.suffix[1:]}: "
        raise ArgumentError(f"{what}{text}.") from error
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
    wanted = list(options.columns) or names
    if has_own_clients(table.schema) and CLIENT not in wanted:
        wanted = [*wanted, CLIENT]
    table = table.select(wanted)
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
