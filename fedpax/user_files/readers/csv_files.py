"""read_csv and stream_csv: CSV and TSV, parsed by pyarrow."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from fedpax.errors import ArgumentError
from fedpax.user_files.finding import DataFile
from fedpax.user_files.formats import BadRows, ReadOptions, TypeChangedError
from fedpax.user_files.readers.csv_errors import (
    check_header,
    check_single_column,
    not_utf8,
    rows_explained,
)
from fedpax.user_files.readers.csv_hints import tell_open_quotes, tell_spaces
from fedpax.user_files.readers.decimal_points import check_decimal_points, check_stated_number

_BLOCK = 1 << 24


def read_csv(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read CSV or TSV. An unquoted empty value, NA, NaN, null, ... is missing."""
    try:
        table = _read(file, options, use_threads=True)
    except pa.ArrowInvalid as error:
        column = _column_of(error, file, options)
        check_stated_number(error, column, options)
        check_header(file, _delimiter(file, options))
        with rows_explained(file, _delimiter(file, options)):
            table = _read(file, options, use_threads=False)  # one thread names the row
    _check_schema(file, options, table.schema)
    tell_open_quotes(file, table, _delimiter(file, options))
    check_decimal_points(table, options)
    _check_clients(file, options, table.schema)
    return table


def stream_csv(file: DataFile, options: ReadOptions) -> Iterator[pa.Table]:
    """Read CSV or TSV in blocks, with the types of the first block."""
    try:
        yield from _blocks(file, options, use_threads=True)
    except pa.ArrowInvalid as error:
        column = _column_of(error, file, options)
        check_stated_number(error, column, options)
        if column is None:
            check_header(file, _delimiter(file, options))
            with rows_explained(file, _delimiter(file, options)):
                for _ in _blocks(file, options, use_threads=False):  # one thread names the row
                    pass
        if column is None or column in options.types:
            raise
        whole = _read(file, options, use_threads=True, columns=[column])
        _check_encoding(file, options, whole.schema)
        check_decimal_points(whole, options)
        raise TypeChangedError(file.path, column, whole.schema.field(0).type) from error


def _blocks(file: DataFile, options: ReadOptions, *, use_threads: bool) -> Iterator[pa.Table]:
    with file.open() as opened:
        reader = csv.open_csv(opened, **_options(file, options, options.types, use_threads))
        _check_schema(file, options, reader.schema)
        examples = 0
        for number, batch in enumerate(reader):
            table = pa.Table.from_batches([batch])
            if number == 0:  # it has decided the types
                check_decimal_points(table, options)
            tell_open_quotes(file, table, _delimiter(file, options), examples)
            examples += len(table)
            yield table
        _check_clients(file, options, reader.schema)


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
            decimal_point=options.decimal_point or ".",
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    }


def _delimiter(file: DataFile, options: ReadOptions) -> str:
    return options.delimiter or ("\t" if file.suffix in (".tsv", ".tab") else ",")


def _check_schema(file: DataFile, options: ReadOptions, schema: pa.Schema) -> None:
    _check_encoding(file, options, schema)
    if len(schema) == 1:
        check_single_column(file, _delimiter(file, options), schema.names[0])
        tell_spaces(file, schema.names[0])


def _check_encoding(file: DataFile, options: ReadOptions, schema: pa.Schema) -> None:
    """Raise an error for texts that are not UTF-8, which pyarrow reads as bytes."""
    try:
        fields = {name: schema.field(k).type for k, name in enumerate(schema.names)}
    except UnicodeDecodeError as error:
        raise not_utf8(file) from error
    if any(pa.types.is_binary(kind) for name, kind in fields.items() if name not in options.types):
        raise not_utf8(file)


def _check_clients(file: DataFile, options: ReadOptions, schema: pa.Schema) -> None:
    """Raise an error for clients of different texts that are read as one number.

    So is a client such as 007, which as a number would be the client 7, also where it is alone.
    """
    client = options.client
    if client is None or client not in schema.names or client in options.types:
        return
    kind = schema.field(client).type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return
    as_text = options._replace(bad_rows=options.bad_rows and BadRows())  # counted already
    given = _options(file, as_text, {client: pa.string()}, use_threads=True, columns=[client])
    texts = pa.array([], pa.string())
    with file.open() as opened:
        for batch in csv.open_csv(opened, **given):
            texts = pc.unique(pa.concat_arrays([texts, batch.column(0).drop_null()]))
    texts = pc.unique(pc.utf8_trim_whitespace(texts))
    plain = pc.replace_substring(texts, options.decimal_point or ".", ".")
    numbers = plain.cast(kind).to_numpy(zero_copy_only=False)
    order = np.argsort(numbers, kind="stable")
    is_equal = numbers[order[1:]] == numbers[order[:-1]]
    is_padded = pc.match_substring_regex(texts, r"^[+-]?0[\dxX]").to_numpy(zero_copy_only=False)
    if is_padded.any():
        places = [int(np.argmax(is_padded))]
    elif is_equal.any():
        first = int(np.argmax(is_equal))
        places = order[first : first + 2].tolist()
        if 2.0**53 < abs(numbers[places[0]]) < np.inf:
            return  # `check_client_numbers` tells of integers beyond float64
    else:
        return
    values = " and ".join(repr(texts[k].as_py()) for k in places)
    raise ArgumentError(
        f"its column {client!r} of clients has the value{'s' * (len(places) - 1)} {values}, read "
        f"as the number {numbers[places[0]]}. Set types={{{client!r}: 'string'}} (--types "
        f"{client}=string) to keep such clients apart, or types={{{client!r}: '{kind}'}} for "
        "numbers"
    )


def _column_of(error: Exception, file: DataFile, options: ReadOptions) -> str | None:
    """Return the column that pyarrow could not convert, or None for another error."""
    match = re.search(r"In CSV column #(\d+)", str(error))
    if match is None:
        return None
    with file.open() as opened:
        # Without stated types, to which the first block may not convert.
        reader = csv.open_csv(opened, **_options(file, options, {}, use_threads=True))
        return str(reader.schema.names[int(match[1])])
