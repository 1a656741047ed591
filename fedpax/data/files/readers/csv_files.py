"""read_csv and stream_csv: CSV and TSV, parsed by pyarrow."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import csv

from fedpax.data.files.finding import DataFile
from fedpax.data.files.formats import ReadOptions, TypeChangedError
from fedpax.errors import ArgumentError

_BLOCK = 1 << 24


def read_csv(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read CSV or TSV. An unquoted empty value, NA, NaN, null, ... is missing."""
    try:
        table = _read(file, options, use_threads=True)
    except pa.ArrowInvalid:
        table = _read(file, options, use_threads=False)  # the message of one thread names the row
    _check_delimiter(file, options, table.schema)
    return table


def stream_csv(file: DataFile, options: ReadOptions) -> Iterator[pa.Table]:
    """Read CSV or TSV in blocks, with the types of the first block.

    Raises:
        TypeChangedError: a later value has another type; the error has that of the whole column.
    """
    try:
        yield from _blocks(file, options, use_threads=True)
    except pa.ArrowInvalid as error:
        column = _column_of(error, file, options)
        if column is None:
            for _ in _blocks(file, options, use_threads=False):  # the message names the row
                pass
        if column is None or column in options.types:
            raise
        whole = _read(file, options, use_threads=True, columns=[column])
        raise TypeChangedError(file.path, column, whole.schema.field(0).type) from error


def _blocks(file: DataFile, options: ReadOptions, *, use_threads: bool) -> Iterator[pa.Table]:
    with file.open() as opened:
        reader = csv.open_csv(opened, **_options(file, options, options.types, use_threads))
        _check_delimiter(file, options, reader.schema)
        for batch in reader:
            yield pa.Table.from_batches([batch])


def _read(
    file: DataFile, options: ReadOptions, *, use_threads: bool, columns: Any = None
) -> pa.Table:
    with file.open() as opened:
        given = _options(file, options, options.types, use_threads, columns)
        return csv.read_csv(opened, **given)


def _options(
    file: DataFile,
    options: ReadOptions,
    types: Mapping[str, pa.DataType],
    use_threads: bool,
    columns: Any = None,
) -> dict[str, Any]:
    bad_rows = options.bad_rows
    return {
        "read_options": csv.ReadOptions(use_threads=use_threads, block_size=_BLOCK),
        "parse_options": csv.ParseOptions(
            delimiter=_delimiter(file, options),
            newlines_in_values=True,
            invalid_row_handler=bad_rows and (lambda row: bad_rows.skip(file.path, row.text)),
        ),
        "convert_options": csv.ConvertOptions(
            column_types=dict(types),
            include_columns=columns,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    }


def _delimiter(file: DataFile, options: ReadOptions) -> str:
    return options.delimiter or ("\t" if file.suffix in (".tsv", ".tab") else ",")


def _check_delimiter(file: DataFile, options: ReadOptions, schema: pa.Schema) -> None:
    if len(schema) == 1 and (found := [c for c in ";\t|" if c in schema.names[0]]):
        raise ArgumentError(
            f"it has one column, {schema.names[0]!r}, which delimiter="
            f"{_delimiter(file, options)!r} does not divide. Set delimiter={found[0]!r}"
        )


def _column_of(error: Exception, file: DataFile, options: ReadOptions) -> str | None:
    """Return the column that pyarrow could not convert, or None for another error."""
    found = re.search(r"In CSV column #(\d+)", str(error))
    if found is None:
        return None
    with file.open() as opened:
        reader = csv.open_csv(opened, **_options(file, options, options.types, use_threads=True))
        return str(reader.schema.names[int(found[1])])
