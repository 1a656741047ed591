"""Tables of all types, written as files, and their comparison."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, ipc

from fedpax.user_files.arrow_numpy import array_to_arrow


def all_types(rng: np.random.Generator, size: int) -> pa.Table:
    images = array_to_arrow(rng.integers(0, 256, (size, 4, 3), np.uint8))
    holes = rng.random(size) < 0.3
    pairs = [None if hole else [1.5, k] for k, hole in enumerate(holes)]
    return pa.table(
        {
            "user": rng.choice(["ann", "bö", "東", ""], size),
            "half": rng.normal(size=size).astype(np.float16),
            "float": pa.array(rng.normal(size=size), mask=holes),
            "big": rng.integers(0, 2**64, size, np.uint64),
            "flag": pa.array(rng.random(size) < 0.5, mask=holes),
            "time": pa.array(rng.integers(0, 2**60, size), pa.timestamp("ns", "Europe/Oslo")),
            "day": pa.array(rng.integers(0, 9999, size).astype("datetime64[D]"), mask=holes),
            "image": images,
            "pair": pa.array(pairs, pa.list_(pa.float32(), 2)),
            "words": [list(range(k % 4)) for k in range(size)],
            "text": pa.array([f"é{k}" for k in range(size)], pa.large_string(), mask=holes),
            "kind": pa.array(rng.choice(["x", "y"], size)).dictionary_encode(),
            "nested": [{"a": k, "b": [str(k)]} for k in range(size)],
            "nothing": pa.nulls(size),
        }
    )  # fmt: skip


def write_arrow(table: pa.Table, path: Path, rows: int = 16) -> Path:
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def assert_equal(actual: Any, expected: Any) -> None:
    assert actual.table.schema.names == expected.table.schema.names
    for name in expected.fields:
        a, b = (s.table.column(name).combine_chunks() for s in (actual, expected))
        if pa.types.is_dictionary(b.type):  # a folder has decoded categories
            b = b.cast(b.type.value_type)
        assert a.equals(b), name
    if expected.client_starts is not None:
        assert actual.client_names == expected.client_names
        np.testing.assert_array_equal(actual.client_starts, expected.client_starts)


def write_csv(table: pa.Table, path: Path) -> None:
    csv.write_csv(table, path)


def write_lines(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def lines(examples: list[dict[str, Any]]) -> bytes:
    """Return examples as JSON lines."""
    return "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples).encode()
