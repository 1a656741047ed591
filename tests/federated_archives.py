"""Archives of TensorFlow Federated, written by tests."""

import lzma
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow_datasets.proto import tf_example_pb2

Fields = dict[str, Any]


def serialize(fields: Fields) -> bytes:
    example = tf_example_pb2.Example()
    for name, value in fields.items():
        feature = example.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif isinstance(value, int):
            feature.int64_list.value.append(value)
        elif value.dtype == np.float32:
            feature.float_list.value.extend(value.tolist())
        else:
            feature.int64_list.value.extend(value.tolist())
    return example.SerializeToString()


def write_archive(path: Path, rows: list[tuple[str, str, bytes]]) -> Path:
    """Write an archive with the same tables and indices as the original ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = path.with_suffix(".building")
    with sqlite3.connect(database) as connection:
        connection.executescript(
            """
            CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL,
                                   serialized_example_proto BLOB NOT NULL);
            CREATE INDEX idx_examples_client_id ON examples (client_id);
            CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
            CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL,
                                          num_examples INTEGER NOT NULL);
            CREATE INDEX idx_metadata_client_id ON client_metadata (client_id);
            """
        )
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        connection.execute(
            "INSERT INTO client_metadata SELECT client_id, split_name, COUNT(*) FROM examples "
            "GROUP BY split_name, client_id"
        )
    connection.close()
    path.write_bytes(lzma.compress(database.read_bytes(), lzma.FORMAT_ALONE, preset=0))
    database.unlink()
    return path
