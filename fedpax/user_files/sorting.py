"""sort_tables: sort tables by client with DuckDB, on the disk where they exceed the memory."""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from fedpax.errors import ArgumentError

if TYPE_CHECKING:
    import duckdb

_ROW = "row"  # keeps the order of a client's examples
_BATCH_BYTES = 1 << 23
_BYTES_PER_THREAD = 1 << 28  # with less, threads of DuckDB run out of memory before they spill

MEMORY = r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B"
"""A regular expression for an amount of memory."""


def sort_tables(
    tables: Iterator[pa.Table], schema: pa.Schema, keys: list[str], spill: Path, memory: str
) -> Iterator[pa.Table]:
    """Yield the rows of tables, stably sorted by columns."""
    import duckdb

    first = next(tables, None)
    if first is None:
        return
    tables = itertools.chain([first], tables)
    # Rows of a batch: a multiple of DuckDB's vectors of 2,048.
    rows = 2048 * min(64, max(1, _BATCH_BYTES // (2048 * max(1, first.nbytes // first.num_rows))))
    stored = stored_schema(schema)
    failed: list[BaseException] = []

    def numbered() -> Iterator[pa.RecordBatch]:
        start = 0
        try:
            for table in tables:
                numbers = pa.array(np.arange(start, start + table.num_rows))
                start += table.num_rows
                with_rows = store(table, stored).append_column(_ROW, numbers)
                yield from with_rows.combine_chunks().to_batches()
        except BaseException as error:
            failed.append(error)  # DuckDB raises another one
            raise

    reader = pa.RecordBatchReader.from_batches(
        stored.append(pa.field(_ROW, pa.int64())), numbered()
    )
    with connect(spill, memory) as connection:
        connection.register("examples", reader)
        names = ", ".join(stored.names)
        order = ", ".join([*(stored.names[schema.names.index(key)] for key in keys), _ROW])
        try:
            result = connection.sql(f"SELECT {names} FROM examples ORDER BY {order}")
            for batch in result.to_arrow_reader(rows):
                yield restore(pa.Table.from_batches([batch]), schema, stored)
        except duckdb.Error as error:
            if failed:
                raise failed[0] from None
            if isinstance(error, duckdb.OutOfMemoryException):
                raise ArgumentError(
                    f"memory={memory!r} is too little to sort rows of these sizes. Give more, such "
                    "as '1GB'."
                ) from error
            raise


def connect(spill: Path, memory: str) -> "duckdb.DuckDBPyConnection":
    """Open a database of DuckDB in memory, which spills to a folder beyond a limit."""
    import duckdb

    settings: dict[str, str | bool | int | float | list[str]] = {
        "temp_directory": str(spill),
        "memory_limit": memory,
        "threads": max(1, min(os.cpu_count() or 1, _bytes(memory) // _BYTES_PER_THREAD)),
        "preserve_insertion_order": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(config=settings)
    connection.execute("SET enable_progress_bar = false")
    return connection


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema in DuckDB, which ignores the case of names: columns are numbers."""
    return pa.schema(
        [
            pa.field(f"c{number}", _stored_type(data_type))
            for number, data_type in enumerate(schema.types)
        ]
    )


def _bytes(memory: str) -> int:
    """Return the number of bytes of an amount such as "4GB" or "512MiB"."""
    match = re.fullmatch(MEMORY, memory)
    assert match is not None
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix) + 1))


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that DuckDB holds without a change for each type of Arrow."""
    if isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        return _stored_type(kind.value_type)
    if pa.types.is_fixed_size_list(kind) and pa.types.is_primitive(kind.value_type):
        if kind.value_type.bit_width >= 8:
            return pa.binary(kind.list_size * kind.value_type.bit_width // 8)
    if _is_opaque(kind):
        return pa.binary(kind.bit_width // 8)
    if pa.types.is_float16(kind):
        return pa.uint16()
    if pa.types.is_temporal(kind):  # nanoseconds and time zones too
        return pa.int64() if kind.bit_width == 64 else pa.int32()
    if pa.types.is_null(kind):
        return pa.int8()
    return kind


def _is_opaque(kind: pa.DataType) -> bool:
    """Return whether DuckDB holds the bytes of a type without their meaning."""
    return bool(pa.types.is_decimal256(kind) or pa.types.is_interval(kind))


def store(table: pa.Table, stored: pa.Schema) -> pa.Table:
    """Give a table the types of `stored_schema`."""
    columns = []
    for column, field in zip(table.columns, stored, strict=True):
        chunks = [_store_array(chunk, field.type) for chunk in column.chunks]
        columns.append(pa.chunked_array(chunks, field.type))
    return pa.table(columns, schema=stored)


def _store_array(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_fixed_size_list(array.type) and pa.types.is_fixed_size_binary(kind):
        return _reinterpret(array, kind)
    if _is_opaque(array.type):
        return pa.Array.from_buffers(kind, len(array), array.buffers(), offset=array.offset)
    if pa.types.is_float16(array.type) or (
        pa.types.is_temporal(array.type) and array.type.bit_width == kind.bit_width
    ):
        return array.view(kind)
    return array.cast(kind)


def _reinterpret(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.null_count or array.flatten().null_count:
        rows = [None if row is None else bytes(row) for row in _row_bytes(array)]
        return pa.array(rows, kind)
    values = array.flatten()
    start = values.offset * values.type.bit_width // 8
    return pa.Array.from_buffers(
        kind, len(array), [None, values.buffers()[1].slice(start, len(array) * kind.byte_width)]
    )


def _row_bytes(array: pa.Array) -> Iterator[bytes | None]:
    for row in array:
        if not row.is_valid:
            yield None
            continue
        values = row.values
        if values.null_count:
            raise ArgumentError("a list of numbers has a missing one")
        yield np.asarray(values).tobytes()


def restore(table: pa.Table, schema: pa.Schema, stored: pa.Schema) -> pa.Table:
    """Give a table of `stored_schema` its own names and types."""
    columns = []
    for column, field, held in zip(table.columns, schema, stored, strict=True):
        chunks = [_restore_array(chunk, field.type, held.type) for chunk in column.chunks]
        columns.append(pa.chunked_array(chunks, field.type))
    return pa.table(columns, schema=schema)


def _restore_array(array: pa.Array, kind: pa.DataType, held: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.FixedShapeTensorType):
        storage = _restore_array(array, kind.storage_type, held)
        return pa.ExtensionArray.from_storage(kind, storage)
    if pa.types.is_fixed_size_binary(held) and not pa.types.is_fixed_size_binary(kind):
        validity, values = _fixed_bytes(array, held.byte_width)
        if _is_opaque(kind):
            return pa.Array.from_buffers(kind, len(array), [validity, values])
        numbers = pa.Array.from_buffers(
            kind.value_type, len(array) * kind.list_size, [None, values]
        )
        return pa.Array.from_buffers(kind, len(array), [validity], children=[numbers])
    array = array.cast(held)
    if pa.types.is_null(kind):
        return pa.nulls(len(array))
    if pa.types.is_float16(kind) or (
        pa.types.is_temporal(kind) and kind.bit_width == held.bit_width
    ):
        return array.view(kind)
    return array.cast(kind)


def _fixed_bytes(array: pa.Array, width: int) -> tuple[pa.Buffer | None, pa.Buffer]:
    """Return which values of an array of bytes are present, and the values, of one width."""
    validity = None
    if array.null_count:
        valid = array.is_valid()
        validity = valid.buffers()[1]
        array = array.fill_null(b"\0" * width)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset :][: len(array) + 1]
    assert (np.diff(offsets) == width).all()
    data = array.buffers()[2]
    start = int(offsets[0])
    return validity, pa.py_buffer(b"") if data is None else data.slice(start, len(array) * width)
