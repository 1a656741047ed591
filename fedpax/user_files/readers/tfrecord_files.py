"""TFRecords of `tf.train.Example`, read without TensorFlow.

A record: length (8 bytes), its checksum (4), content, its checksum (4), little-endian.
"""

import struct
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import google_crc32c
import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.sources.source import example_features
from fedpax.user_files.finding import DataFile
from fedpax.user_files.formats import ReadOptions
from fedpax.user_files.read_table import add_clients, join_parts

_ROWS_AT_ONCE = 1 << 14
_LARGEST = 1 << 31  # bytes of a record: protobuf reads no longer one
_GROUP = "serialized_bytes"  # the feature list of Dataset Grouper
_FLOATS = {  # Python's floats are float64; those of `tf.train.Example` are float32
    pa.float64(): pa.float32(),
    pa.list_(pa.float64()): pa.list_(pa.float32()),
}


def read_tfrecord(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read a row from each example: one value of a feature as it is, several as a list."""
    return join_parts(stream_tfrecord(file, options))


def stream_tfrecord(file: DataFile, options: ReadOptions) -> Iterator[pa.Table]:
    """Read the examples in parts; a part has the types of its own values."""
    # A group of Dataset Grouper is a client: the file's name and the record's number.
    del options
    stem = PurePath(file.path).name.partition(".")[0]
    rows: list[dict[str, Any]] = []
    clients: list[str] = []
    for number, record in enumerate(_records(file)):
        features = example_features(record)
        group = [features] if features is not None else _group(record)
        if group is None or None in group:
            raise ArgumentError(f"record {number} is not a tf.train.Example with features")
        if rows and (features is None) != bool(clients):
            raise ArgumentError(f"record {number} and those before are not all groups of examples")
        rows += [row for row in group if row is not None]
        clients += [] if features is not None else [f"{stem}:{number:07}"] * len(group)
        if len(rows) >= _ROWS_AT_ONCE:
            yield _to_table(rows, clients)
            rows, clients = [], []
    if rows:
        yield _to_table(rows, clients)


def _group(record: bytes) -> list[dict[str, Any] | None] | None:
    """Return the examples of a group, or None if the record is not a group."""
    from tensorflow_datasets.proto import tf_example_pb2

    sequence = tf_example_pb2.SequenceExample()
    try:
        sequence.ParseFromString(record)
    except Exception:  # protobuf's own type, which has no stubs
        return None
    if list(sequence.feature_lists.feature_list) != [_GROUP]:
        return None
    values = [f.bytes_list.value for f in sequence.feature_lists.feature_list[_GROUP].feature]
    return [example_features(value) for each in values for value in each]


def _to_table(rows: list[dict[str, Any]], clients: list[str]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(isinstance(value, list) for value in values):  # of another length in each example
            values = [v if v is None or isinstance(v, list) else [v] for v in values]
        column = pa.array(values)
        columns[name] = column.cast(_FLOATS.get(column.type, column.type))
    table = pa.table(columns)
    return add_clients(table, clients) if clients else table


def _records(file: DataFile) -> Iterator[bytes]:
    with file.open() as opened:
        number = 0
        while head := opened.read(12):
            length, checksum = struct.unpack("<QI", head) if len(head) == 12 else (0, 0)
            if len(head) < 12 or _mask(head[:8]) != checksum:
                raise ArgumentError(f"record {number} has a damaged length")
            if length > _LARGEST:
                raise ArgumentError(f"record {number} has {length} bytes, expected at most 2 GiB")
            content = opened.read(length)
            tail = opened.read(4)
            if len(content) < length or len(tail) < 4:
                raise ArgumentError(f"record {number} is cut off")
            if _mask(content) != struct.unpack("<I", tail)[0]:
                raise ArgumentError(f"record {number} is damaged")
            yield content
            number += 1


def _mask(content: bytes) -> int:
    crc: int = google_crc32c.value(content)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
