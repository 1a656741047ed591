"""check_integers_of_floats: integers that a column of floats does not hold."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedpax.errors import ArgumentError
from fedpax.user_files.formats import ReadOptions

_MOST_LISTED = 10  # columns
_LARGEST = 2.0**53  # above, floats skip integers


def check_integers_of_floats(
    table: pa.Table,
    options: ReadOptions,
    integers_of: Callable[[str], Iterable[int]],
    remedy: str,
) -> None:
    """Raise for an integer that the parser has rounded, unless floats are stated."""
    # `integers_of` reads a column's integers again, as the file has them.
    for name, column in zip(table.column_names, table.columns, strict=True):
        stated = options.types.get(name)
        is_stated = stated is not None and pa.types.is_floating(stated)
        is_selected = not options.columns or name in options.columns
        is_twice = table.column_names.count(name) > 1  # raises later
        if is_stated or not is_selected or name == options.client or is_twice:
            continue
        if _has_large_floats(column):
            for value in integers_of(name):
                if abs(value) >= 2**1024 or int(float(value)) != value:
                    others = [other for other in table.column_names if other != name]
                    listed = others if len(others) <= _MOST_LISTED else "[...]"
                    raise ArgumentError(
                        f"its column {name!r} has the integer {value} and is read as double, which "
                        f"does not hold it. {remedy.format(name=name)}, or leave the column out "
                        f"with columns={listed}"
                    )


def _has_large_floats(column: pa.ChunkedArray) -> bool:
    for chunk in column.chunks:
        while pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
            chunk = chunk.flatten()
        if not pa.types.is_float64(chunk.type):
            return False
        values = chunk.drop_null().to_numpy(zero_copy_only=False)
        if np.max(np.abs(values), initial=0, where=~np.isnan(values)) >= _LARGEST:
            return True
    return False


def integers_in_texts(texts: Any) -> Iterator[int]:
    """Yield the large integers among the texts of a column of numbers."""
    large = pc.match_substring_regex(texts, r"^\s*[+-]?[0-9]{16,400}\s*$")
    yield from map(int, texts.filter(large).to_pylist())


def integers_in_lines(lines: Iterable[bytes], name: str) -> Iterator[int]:
    """Yield the integers of a name in JSON lines, also those in its lists."""
    for line in lines:
        try:
            example = json.loads(line)
        except ValueError:  # a damaged line that is skipped
            continue
        values = [example.get(name)] if isinstance(example, dict) else []
        while values:
            value = values.pop()
            if isinstance(value, list):
                values += value
            elif type(value) is int:
                yield value
