"""survey_files: what `fedpax data` shows of files, in memory that does not grow with their rows."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float64, Int64, UInt64

from fedpax.data.tables.fitted_column import (
    ColumnSummary,
    is_counted,
    summarize_columns,
    value_range,
)
from fedpax.data.tables.treatments import infer_treatment, infer_treatments
from fedpax.data.tables.values import TextValues, is_date, is_missing, is_number, is_text
from fedpax.errors import ArgumentError
from fedpax.user_files.arrow_numpy import check_client_type, encode_values
from fedpax.user_files.file_sizes import estimate_bytes
from fedpax.user_files.finding import CLIENT
from fedpax.user_files.folders import is_files
from fedpax.user_files.formats import LoadOptions, find_stream
from fedpax.user_files.held_out import add_partition, check_partition
from fedpax.user_files.image_hashes import visible
from fedpax.user_files.open_files import open_in_order
from fedpax.user_files.prepared import prepared_folder
from fedpax.user_files.readers.image_files import describe_read
from fedpax.user_files.reading import Reading
from fedpax.user_files.selection import select_files
from fedpax.user_files.sorting import connect, restore, store, stored_schema
from fedpax.user_files.table_source import TableSource

MEMORY = "1GB"
"""The memory of DuckDB for hash tables; beyond it they are on the disk."""

_ROWS = 1 << 16  # of a table in memory that are counted at once
_SHARE = 8  # one of as many hashes is counted: counting all takes a fifth of the time
_LARGE = 1 << 28  # bytes; smaller files are read at once, which is faster


class Survey(NamedTuple):
    """Columns and clients of files."""

    name: str
    num_examples: int
    schema: pa.Schema
    summaries: list[ColumnSummary]
    label: str | None
    client: str | None
    clients: pa.ChunkedArray | None  # names, ascending
    sizes: Int64[np.ndarray, " clients"]
    # The distinct labels, and (client, label, number of examples) of those that occur together.
    labels: pa.ChunkedArray | None
    pairs: Int64[np.ndarray, "3 pairs"] | None
    repeated: str
    notes: tuple[str, ...] = ()  # on how images were read


def is_large(files: Any, options: LoadOptions) -> bool:
    """Return whether files take much memory as a source, and need not be one."""
    names = files if isinstance(files, list) else [files]
    if not all(map(is_files, names)):
        return False
    if len(names) == 1 and prepared_folder(names[0], options.split):
        return options.partition is not None  # which would sort it in memory
    groups = select_files(files, options).groups
    return estimate_bytes(groups) > _LARGE and all(find_stream(group[0]) for group in groups)


def survey_files(files: Any, options: LoadOptions, max_labels: int) -> Survey:
    """Summarize the columns and clients of files that are read in parts: twice if with clients."""
    # A label with more than `max_labels` distinct values is not counted by client.
    if isinstance(files, str) and (folder := prepared_folder(files, options.split)):
        return _survey_folder(open_in_order(folder, options), max_labels)
    read = Counter[str]()
    selected = select_files(files, options, read)
    reading = Reading(selected, options, None)
    reading.read_schema(first_part=True)
    reading.check_columns()
    if options.partition is not None:
        check_partition(reading.schema.names, options)
    counts = reading.repeat(_count_columns)
    if not counts.num_examples:
        raise ArgumentError(
            f"{selected.name} has no examples, expected at least one. Name other files."
        )
    reading.log_without_examples()
    schema = pa.schema([reading.schema.field(name) for name in visible(reading.schema.names)])
    client, label = reading.client, options.label
    summaries = counts.summaries(schema)
    survey = Survey(
        selected.name, counts.num_examples, schema, summaries, label, client, None,
        np.zeros(0, np.int64), None, None, counts.repeated, tuple(describe_read(read)),
    )  # fmt: skip
    if client is None and options.partition is None:
        return survey
    if client is not None:
        check_client_type(schema.field(client).type, client, selected.name)
        label = _class_label(survey, label, max_labels)
    in_path = {name for group in selected.groups for file in group for name in file.fields}
    kept = [name for name in (options.client, label) if name is not None and name not in in_path]
    few = options._replace(columns=kept, label=label)
    reading = Reading(select_files(files, few), few, None)
    reading.read_schema(first_part=True)
    if client is None:
        rows = pa.table({"": pa.nulls(survey.num_examples)})
        if label is not None:
            rows = reading.repeat(lambda again: _read_column(again, label))
        return _with_partition(survey, add_partition(rows, options), label, max_labels)
    keys = [client] if label is None else [client, label]
    return _with_clients(survey, reading.repeat(lambda again: _count_groups(again, keys)))


def _survey_folder(source: TableSource, max_labels: int) -> Survey:
    """Summarize a prepared folder, which stays memory-mapped, and the clients of a partition."""
    table = source.table.drop_columns([CLIENT])
    columns = {name: table.column(name) for name in table.column_names}
    summaries = summarize_columns(columns, infer_treatments(columns))
    survey = Survey(
        source.name, len(source), table.schema, summaries, source.label, None, None,
        np.zeros(0, np.int64), None, None, 
        f"{len(table) - len(np.unique(hash_examples(table, None)[0])):,}",
    )  # fmt: skip
    return _with_partition(survey, source.table, source.label, max_labels)


def _with_partition(survey: Survey, rows: pa.Table, label: str | None, max_labels: int) -> Survey:
    """Add the clients of a partition, a column of the examples, and their labels."""
    clients = {CLIENT: rows.column(CLIENT)}
    survey = survey._replace(
        schema=survey.schema.append(rows.schema.field(CLIENT)),
        summaries=[*survey.summaries, *summarize_columns(clients, infer_treatments(clients))],
        client=CLIENT,
    )
    label = _class_label(survey, label, max_labels)
    keys = [CLIENT] if label is None else [CLIENT, label]
    groups = rows.select(keys).group_by(keys).aggregate([([], "count_all")])
    return _with_clients(survey, groups.select([*keys, "count_all"]))


def _class_label(survey: Survey, label: str | None, max_labels: int) -> str | None:
    """Return the label, or None if its values are not classes."""
    if label is None:
        return None
    about = survey.summaries[survey.schema.names.index(label)]
    data_type = survey.schema.field(label).type
    is_moment = is_date(data_type) and not pa.types.is_time(data_type)
    is_class = is_counted(data_type) and not pa.types.is_floating(data_type) and not is_moment
    return label if is_class and (about.num_distinct or 0) <= max_labels else None


def _read_column(reading: Reading, name: str) -> pa.Table:
    """Read one column of all parts, with the values of texts once."""
    parts = [table.select([name]) for table in reading.tables()]
    if is_text(reading.schema.field(name).type):
        parts = [pa.table({name: part.column(0).dictionary_encode()}) for part in parts]
    return pa.concat_tables(parts).unify_dictionaries()


class _Counts(NamedTuple):
    """Counts of columns over all parts."""

    num_examples: int
    repeated: str
    missing: dict[str, int]
    ends: dict[str, list[pa.Array]]  # the least and largest value of each part
    distinct: dict[str, int]
    texts: dict[str, TextValues]

    def summaries(self, schema: pa.Schema) -> list[ColumnSummary]:
        return [self._summary(field) for field in schema]

    def _summary(self, field: pa.Field) -> ColumnSummary:
        name, distinct = field.name, self.distinct.get(field.name)
        missing = self.missing[name]
        treatment = infer_treatment(name, field.type, self.num_examples, missing, distinct)
        ends = pa.concat_arrays(self.ends[name]) if name in self.ends else pa.nulls(0)
        note = self.texts[name].describe(name) if name in self.texts else ""
        return ColumnSummary(treatment, str(field.type), missing, distinct, value_range(ends), note)


def _count_columns(reading: Reading) -> _Counts:
    """Count the missing and distinct values of each column, and the repeated examples."""
    schema = pa.schema([reading.schema.field(name) for name in visible(reading.schema.names)])
    examples, missing = 0, dict.fromkeys(schema.names, 0)
    ends: dict[str, list[pa.Array]] = {}
    texts = {field.name: TextValues() for field in schema if is_text(field.type)}

    def parts() -> Iterator[pa.Table]:
        nonlocal examples
        for table in reading.tables():
            examples += table.num_rows
            columns = []
            for name in schema.names:
                column = table.column(name).combine_chunks()
                absent = is_missing(column)
                missing[name] += int(absent.sum())
                if is_number(column.type) or is_date(column.type):
                    ends.setdefault(name, []).append(_ends(column))
                if name in texts:
                    texts[name].add(column)
                columns.append(_to_count(column, absent))
            yield pa.table(columns, schema=_schema_to_count(schema))

    counted = {f.name: f"count(DISTINCT c{k})" for k, f in enumerate(schema) if is_counted(f.type)}
    select = ", ".join([*counted.values(), "count(h) - count(DISTINCT h)"])
    # Equal examples have equal hashes, so a share of all hashes has the share of repeated examples.
    key = f"hash({', '.join(stored_schema(schema).names)})"
    some = f"CASE WHEN {key} % {_SHARE} = 0 THEN {key} END AS h"
    sql = f"SELECT {select} FROM (SELECT *, {some} FROM examples)"
    row = [*_query(parts(), _schema_to_count(schema), sql).to_pylist()[0].values()]
    distinct, number = dict(zip(counted, row, strict=False)), _SHARE * row[-1]
    repeated = "About " * (number > 0 and _SHARE > 1) + f"{number:,}"
    return _Counts(examples, repeated, missing, ends, distinct, texts)


def hash_examples(table: pa.Table, client: str | None) -> list[UInt64[np.ndarray, " examples"]]:
    """Return hashes of all examples but for their clients, and of their clients, in any order."""

    def parts() -> Iterator[pa.Table]:
        for start in range(0, table.num_rows, _ROWS):
            columns = [column.combine_chunks() for column in table.slice(start, _ROWS).columns]
            yield pa.table(
                [_to_count(column, is_missing(column)) for column in columns],
                schema=_schema_to_count(table.schema),
            )

    names = stored_schema(table.schema).names
    owner = "0" if client is None else names.pop(table.column_names.index(client))
    sql = f"SELECT hash({', '.join(names) or '0'}) AS k, hash({owner}) AS o FROM examples"
    hashes = _query(parts(), _schema_to_count(table.schema), sql)
    return [column.to_numpy() for column in hashes.columns]


def _count_groups(reading: Reading, keys: list[str]) -> pa.Table:
    """Count the examples of each client, or of each client and label."""
    schema = pa.schema([reading.schema.field(key) for key in keys])
    names = stored_schema(schema).names
    sql = f"SELECT {', '.join(names)}, count(*) AS n FROM examples GROUP BY {', '.join(names)}"
    groups = _query((table.select(keys) for table in reading.tables()), schema, sql)
    table = restore(groups.select(names), schema, stored_schema(schema))
    return table.append_column("", groups.column("n").cast(pa.int64()))


def _query(tables: Iterator[pa.Table], schema: pa.Schema, sql: str) -> pa.Table:
    """Run a query of DuckDB over `examples`, the tables with columns c0, c1, ...."""
    import duckdb

    stored = stored_schema(schema)
    failed: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for table in tables:
                renamed = store(table, stored).combine_chunks()
                yield from renamed.to_batches()
        except BaseException as error:
            failed.append(error)  # DuckDB raises another one
            raise

    with (
        tempfile.TemporaryDirectory(prefix="fedpax-data-") as spill,
        connect(Path(spill), MEMORY) as connection,
    ):
        connection.register("examples", pa.RecordBatchReader.from_batches(stored, batches()))
        try:
            return connection.sql(sql).to_arrow_table()
        except duckdb.Error as error:
            if failed:
                raise failed[0] from None
            raise ArgumentError(
                f"The hash tables of distinct values exceed {MEMORY} of memory and cannot be "
                f"written to {tempfile.gettempdir()}: {error}. Set TMPDIR to a folder on a disk "
                "with more space, or show some columns with columns=."
            ) from error


def _ends(column: pa.Array) -> pa.Array:
    data_type = column.type
    if pa.types.is_duration(data_type):  # whose least value Arrow does not find
        return _ends(column.view(pa.int64())).view(data_type)
    ends = pc.min_max(column)
    return pa.array([ends["min"], ends["max"]], data_type)


# Arrow counts 0.0 and -0.0 as two values, and DuckDB as one.
_BITS = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}


def _to_count(column: pa.Array, absent: Bool[np.ndarray, " examples"]) -> pa.Array:
    """Return a column for DuckDB, whose missing values are null."""
    if absent.any() and is_counted(column.type):
        column = pc.if_else(pa.array(~absent), column, pa.scalar(None, column.type))
    if pa.types.is_fixed_size_list(column.type):  # which may lack a number
        return column.cast(pa.list_(column.type.value_type))
    return column.view(_BITS[column.type]) if column.type in _BITS else column


def _schema_to_count(schema: pa.Schema) -> pa.Schema:
    none = np.zeros(0, np.bool_)
    return pa.schema(
        [field.with_type(_to_count(pa.nulls(0, field.type), none).type) for field in schema]
    )


def _with_clients(survey: Survey, groups: pa.Table) -> Survey:
    client, amount = groups.column(0), groups.column(groups.num_columns - 1).to_numpy()
    names, owner = encode_values(client)
    sizes = np.bincount(owner, amount, minlength=len(names)).astype(np.int64)
    labels, pairs = None, None
    if groups.num_columns == 3:
        labels, label = encode_values(groups.column(1))
        pairs = np.stack([owner, label, amount])
    return survey._replace(clients=names, sizes=sizes, labels=labels, pairs=pairs)


def merge_pairs(
    owner: Int64[np.ndarray, " n"], label: Int64[np.ndarray, " n"], amount: Int64[np.ndarray, " n"]
) -> Int64[np.ndarray, "3 pairs"]:
    """Add up the amounts of equal pairs: values can have one name, null and the text "missing"."""
    labels = int(label.max()) + 1
    cells, place = np.unique(owner * labels + label, return_inverse=True)
    total = np.bincount(place, amount).astype(np.int64)
    return np.stack([cells // labels, cells % labels, total])


def label_skew(
    pairs: Int64[np.ndarray, "3 pairs"], sizes: Int64[np.ndarray, " clients"]
) -> tuple[float, float, float, float]:
    """Return what `PartitionStatistics` has of labels, from the pairs that occur."""
    owner, label, amount = pairs
    overall = np.bincount(label, amount) / amount.sum()
    share = amount / sizes[owner]
    # A label that a client has not adds its overall frequency to the sum of differences.
    differences = (np.abs(share - overall[label]) - overall[label]).sum() + len(sizes)
    return (
        len(owner) / len(sizes),
        float(0 - _x_log_x(share).sum() / len(sizes)),
        float(0 - _x_log_x(overall).sum()),
        float(differences / 2 / len(sizes)),
    )


def _x_log_x(share: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    return share * np.log(share, where=share > 0, out=np.zeros_like(share))
