"""Records: the numbers of an example side by side, beside the columns of a prepared folder.

A small client has a few bytes of each column. The columns of its examples are on different pages,
and its records on one: a round of a large population misses the caches once a client, not once a
client and column.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedpax.user_files.columns import is_number, to_numpy

RECORDS = "records.bin"
_MOST_ROWS = 64  # of a client on average: larger clients are read as fast from columns
_CACHED_ROWS = 1 << 12  # whose columns are in the cache while they are divided
_HUGE_PAGE = 1 << 21  # Linux maps a file by these pages where whole ones were written at once
_ALIGNMENT = 8  # bytes of the largest numbers


def write_records(folder: Path, table: pa.Table, num_clients: int) -> list[str]:
    """Write the columns of numbers as records, and return their names; none for large clients."""
    names = [
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if is_number(column.type) and not column.null_count
    ]
    if len(names) < 2 or table.num_rows > _MOST_ROWS * num_clients:
        return []
    record = _record(table.schema, names)
    block = np.zeros(_HUGE_PAGE // (record.itemsize & -record.itemsize), record)
    with (folder / RECORDS).open("wb") as file:
        for begin in range(0, len(table), len(block)):
            rows = table.slice(begin, len(block))
            for at in range(0, len(rows), _CACHED_ROWS):
                some = rows.slice(at, _CACHED_ROWS)
                for name in names:
                    block[name][at : at + len(some)] = to_numpy(some.column(name))
            file.write(block[: len(rows)].data)
    return names


def open_records(folder: Path, table: pa.Table, names: list[str]) -> NDArray[Any]:
    """Map the records of a table's columns, a structured array `[examples]`."""
    records: NDArray[Any] = np.memmap(folder / RECORDS, _record(table.schema, names), "r")
    if len(records) != len(table):
        raise ValueError(f"{RECORDS} has {len(records)} examples, expected {len(table)}")
    return records


def _record(schema: pa.Schema, names: list[str]) -> np.dtype[Any]:
    """Return the type of a record, in which every number is at a multiple of its size."""
    kinds = {name: np.dtype(schema.field(name).type.to_pandas_dtype()) for name in names}
    names = sorted(names, key=lambda name: -kinds[name].itemsize)
    ends = np.cumsum([kinds[name].itemsize for name in names])
    return np.dtype(
        {
            "names": names,
            "formats": [kinds[name] for name in names],
            "offsets": [0, *ends[:-1].tolist()],
            "itemsize": -(-int(ends[-1]) // _ALIGNMENT) * _ALIGNMENT,
        }
    )
