"""Prepare files as shards in a job of any engine, in the order of `fedpax.data.prepare`.

`survey_group`, `ShardPlan.of`, `split_rows` and `write_shard` run in this order.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64
from pyarrow import ipc

from fedpax.user_files.arrow_numpy import encode_values, to_numpy
from fedpax.user_files.prepared import write_prepared
from fedpax.user_files.reading import Reading, unify_parts
from fedpax.user_files.sorting import sort_tables

_SHARD_BYTES = 1 << 28
_SAMPLE = 100  # clients of a part
_GROUP_ROWS = 1 << 40  # more than a group of files has


class GroupSurvey(NamedTuple):
    """What a group of files has."""

    schema: pa.Schema  # without the columns that paths name
    types: dict[str, pa.DataType]  # of columns, where the first part of the file has another
    rows: int
    nbytes: int
    clients: Any  # an array with a sample of them. None: the paths name them, or there are none
    weights: Float64[np.ndarray, " sample"]  # rows that each client of the sample stands for

    def encode(self) -> bytes:
        """Return the survey as an Arrow IPC stream."""
        columns: dict[str, Any] = {"weights": self.weights}
        if self.clients is not None:
            columns["clients"] = self.clients
        about = {
            "schema": self.schema.serialize().to_pybytes(),
            "types": pa.schema([*self.types.items()]).serialize().to_pybytes(),
            "rows": str(self.rows),
            "nbytes": str(self.nbytes),
        }
        return encode_table(pa.table(columns).replace_schema_metadata(about))

    @classmethod
    def decode(cls, content: bytes) -> "GroupSurvey":
        """Return the survey that `encode` has encoded."""
        table = decode_table(content)
        about = table.schema.metadata
        types = ipc.read_schema(pa.py_buffer(about[b"types"]))
        return cls(
            ipc.read_schema(pa.py_buffer(about[b"schema"])),
            {field.name: field.type for field in types},
            int(about[b"rows"]),
            int(about[b"nbytes"]),
            table["clients"].combine_chunks() if "clients" in table.column_names else None,
            table["weights"].to_numpy(),
        )


def survey_group(reading: Reading, number: int) -> GroupSurvey:
    """Read all of a group of files, so that every damaged row is met."""
    reading = reading.copy()
    names: dict[str, None] = {}  # in the order of the first parts
    return reading.repeat(lambda again: _survey(again, number, names))


def _survey(reading: Reading, number: int, names: dict[str, None]) -> GroupSurvey:
    schemas: dict[pa.Schema, None] = {}
    clients, weights = [], []
    rows = nbytes = 0
    file = reading.groups[number][0]
    for part, (table, schema, client) in enumerate(reading.raw_parts(number)):
        schemas[schema] = None
        names |= dict.fromkeys(schema.names)
        if client in table.column_names and table.num_rows:
            places = np.random.default_rng([number, part]).permutation(table.num_rows)[:_SAMPLE]
            clients.append(table.column(client).take(pa.array(places)).combine_chunks())
            weights.append(np.full(len(places), table.num_rows / len(places)))
        rows += table.num_rows
        nbytes += table.nbytes
    together = unify_parts(file, [*schemas])
    schema = pa.schema([together.field(name) for name in names])
    sample = None
    if clients:
        data_type = schema.field(client).type
        data_type = data_type.value_type if pa.types.is_dictionary(data_type) else data_type
        sample = pa.concat_arrays([array.cast(data_type) for array in clients])
    stands_for = np.concatenate([np.zeros(0), *weights])
    return GroupSurvey(schema, reading.types.get(file.path, {}), rows, nbytes, sample, stands_for)


class ShardPlan(NamedTuple):
    """How rows are divided into shards, and the order of rows."""

    reading: Reading
    about: dict[str, Any]
    bounds: Any  # an array: the least client of each shard but the first
    order: str  # the name of a column with the number of each row

    @classmethod
    def of(
        cls, reading: Reading, surveys: Sequence[GroupSurvey], num_shards: int | None
    ) -> "ShardPlan":
        """Divide the clients of all groups; `reading` gets the schema of all of them."""
        for group, survey in zip(reading.groups, surveys, strict=True):
            reading.types.setdefault(group[0].path, {}).update(survey.types)
        reading.join([survey.schema for survey in surveys])
        about = reading.describe()
        order = "row"
        while order in reading.schema.names:
            order = f"_{order}"
        count = num_shards or -(-sum(survey.nbytes for survey in surveys) // _SHARD_BYTES)
        names, weights = _sample(reading, surveys)
        by_name = pc.array_sort_indices(names).to_numpy()
        until = np.cumsum(weights[by_name])
        cuts = np.linspace(0, until[-1] if len(until) else 0, max(1, count) + 1)[1:-1]
        bounds = names.take(pa.array(by_name[np.searchsorted(until, cuts)])).unique()
        if len(bounds) and bounds[0] == names[int(by_name[0])]:
            bounds = bounds[1:]
        return cls(reading, about, bounds, order)

    @property
    def schema(self) -> pa.Schema:
        """The schema of rows between `split_rows` and `write_shard`."""
        return self.reading.schema.append(pa.field(self.order, pa.int64()))


def _sample(
    reading: Reading, surveys: Sequence[GroupSurvey]
) -> tuple[Any, Float64[np.ndarray, " sample"]]:
    """Return clients, or numbers of rows, by which shards are divided, and their weights."""
    keys: list[Any] = []
    weights: list[Any] = []
    for number, (survey, fields) in enumerate(zip(surveys, reading.fields, strict=True)):
        if reading.client is None:
            places = np.linspace(0, survey.rows, _SAMPLE, endpoint=False).astype(np.int64)
            keys.append(pa.array(number * _GROUP_ROWS + places))
        elif survey.clients is None:
            keys.append(pa.array([own[reading.client] for own in fields if reading.client in own]))
        else:
            keys.append(survey.clients)
            weights.append(survey.weights)
            continue
        weights.append(np.full(len(keys[-1]), survey.rows / max(1, len(keys[-1]))))
    data_type = pa.int64() if reading.client is None else reading.schema.field(reading.client).type
    return pa.concat_arrays([array.cast(data_type) for array in keys]), np.concatenate(weights)


def split_rows(plan: ShardPlan, number: int) -> Iterator[tuple[int, bytes]]:
    """Yield shards and rows of a group that they have."""
    reading = plan.reading
    start = number * _GROUP_ROWS
    for table in reading.group_tables(number):
        order = start + np.arange(table.num_rows)
        start += table.num_rows
        table = table.append_column(plan.order, pa.array(order))
        keys, places = encode_values(table.column(reading.client or plan.order))
        shard = np.searchsorted(to_numpy(plan.bounds), to_numpy(keys), side="right")[places]
        in_order = table.take(pa.array(np.argsort(shard, kind="stable")))
        ends = np.cumsum(np.bincount(shard))
        for k, end in enumerate(ends):
            if rows := end - (ends[k - 1] if k else 0):
                yield k, encode_table(in_order.slice(end - rows, rows))


@contextlib.contextmanager
def write_shard(
    plan: ShardPlan, rows: Iterable[bytes], memory: str, parent: str | None
) -> Iterator[Path]:
    """Write rows of `split_rows` as a prepared folder, removed at the end unless moved."""
    scratch = Path(tempfile.mkdtemp(prefix="shard-draft-", dir=parent))
    try:
        keys = [name for name in (plan.reading.client, plan.order) if name is not None]
        tables: Iterator[pa.Table] = map(decode_table, rows)
        tables = sort_tables(tables, plan.schema, keys, scratch / "spill", memory)
        folder = scratch / "folder"
        folder.mkdir()
        schema = plan.reading.schema
        tables = (table.select(schema.names) for table in tables)
        write_prepared(folder, tables, schema, plan.about)
        yield folder
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def encode_table(table: pa.Table) -> bytes:
    """Return a table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def decode_table(content: bytes) -> pa.Table:
    """Return the table that `encode_table` has encoded."""
    return ipc.open_stream(content).read_all()
