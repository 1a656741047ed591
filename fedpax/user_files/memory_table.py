"""memory_table: tables and arrays in Python as Arrow tables; their libraries are not imported."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.primitives.casts import host_array
from fedpax.user_files.columns import array_to_arrow, is_pandas_index, plain_types
from fedpax.user_files.formats import ReadOptions
from fedpax.user_files.readers.hugging_face import decode_features


def memory_table(data: Any, columns: Sequence[str]) -> pa.Table | None:
    """Return a table that is in memory, or None if `data` is something else, such as paths."""
    if isinstance(data, Mapping):
        table = pa.table({name: _to_arrow(name, values) for name, values in data.items()})
    elif hasattr(data, "with_format") and hasattr(data, "features"):  # Hugging Face
        table = pa.table(data.with_format("arrow")[:])
    elif hasattr(data, "__arrow_c_stream__"):
        table = pa.table(data)
    else:
        return None
    names = table.column_names
    if twice := [name for name in names if names.count(name) > 1]:
        raise ArgumentError(
            f"The table has several columns named {twice[0]!r}, expected different names. Rename "
            "them."
        )
    if missing := [name for name in columns if name not in table.column_names]:
        raise ArgumentError(
            f"columns has {missing[0]!r}, expected names among "
            f"{', '.join(map(repr, table.column_names))}."
        )
    if not table.num_rows:
        raise ArgumentError("The table has no examples, expected at least one. Pass another one.")
    table = plain_types(decode_features(table, ReadOptions(tuple(columns), {}, None)))
    table = table.select(list(columns) or [n for n in names if not is_pandas_index(n)])
    return table.replace_schema_metadata(None)


def _to_arrow(name: str, values: Any) -> Any:
    """Convert the values of a column, one for each example."""
    try:
        if isinstance(values, np.ma.MaskedArray) and values.ndim == 1:
            return pa.array(values.data, mask=np.ma.getmaskarray(values))
        is_array = isinstance(values, np.ndarray)
        return array_to_arrow(host_array(values, "it")) if is_array else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        text = str(error).rstrip(".")
        raise ArgumentError(
            f"The column {name!r}, of type {type(values).__name__}, cannot be read: {text}. Pass "
            "an array [examples, ...], or a list with one value for each example."
        ) from error
