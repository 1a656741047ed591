"""as_examples: what users have in memory (records, columns, data frames) as a sequence of dicts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.errors import ArgumentError, ArgumentTypeError, MissingFieldError
from fedpax.primitives.casts import host_array

Examples = Sequence[Mapping[str, Any]]
"""A source of examples: a sequence of dicts, each with an example's fields."""

ACCEPTED = (
    "expected a source from fedpax.data.load, a list of dicts with one dict for each example, a "
    "dict of columns {field: array [examples, ...]}, or a data frame or table (pandas, Polars, "
    "pyarrow)"
)


class Columns(Sequence[dict[str, Any]]):
    """Columns of equal length, by field, as a sequence of examples."""

    def __init__(self, columns: Mapping[str, Any], name: str = "columns") -> None:
        for field, values in columns.items():
            if isinstance(values, np.ma.MaskedArray):
                host_array(values, f"The field {field!r} of {name}")
            if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
                raise ArgumentTypeError(
                    f"{name} is a dict whose field {field!r} is a {type(values).__name__}, "
                    f"{ACCEPTED}. Put a single example in a list: [{name}]."
                )
        lengths = {field: len(values) for field, values in columns.items()}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            raise ArgumentError(
                f"{name} has fields of {lengths} examples, expected one length that is not 0: "
                "give one value of each field for every example."
            )
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: Any) -> Any:
        """Return an example: a dict of its fields."""
        return {field: values[index] for field, values in self.columns.items()}

    def column(self, field: str) -> Iterator[Any]:
        """Yield one field of every example, in order."""
        yield from self.columns[field]


def as_examples(source: Any, name: str = "source") -> Sequence[Mapping[str, Any]]:
    """Return a user's data as a sequence of examples, each a dict of its fields."""
    # `source`: a sequence of dicts, such as a source from `load`, which is returned itself; a dict
    # of columns; a data frame of pandas or Polars; a table of pyarrow; or a NumPy array with named
    # fields.
    if (columns := _columns(source)) is not None:
        return Columns(columns, name)
    described = f"a {type(source).__name__}"
    if isinstance(source, str | bytes) or not hasattr(source, "__getitem__"):
        is_lazy = hasattr(source, "__next__")
        remedy = f"Read it into a list: list({name})." if is_lazy else "Convert it to one of these."
    elif isinstance(source, np.ndarray) or hasattr(source, "to_numpy"):
        remedy = f"Name its field: {{'text': {name}}} or another name."
    else:
        # Other sequences are not read here: an example may be far away.
        if not isinstance(source, list | tuple) or not source or hasattr(source[0], "keys"):
            return source
        element_type = type(source[0]).__name__
        described += f" of {element_type}"
        is_text = isinstance(source[0], str | bytes)
        remedy = (
            f"Name the field of its texts: [{{'text': text}} for text in {name}]."
            if is_text
            else f"Name the fields of each {element_type}: give dicts."
        )
    raise ArgumentTypeError(f"{name} is {described}, {ACCEPTED}. {remedy}")


def get_field(example: Mapping[str, Any], field: str) -> Any:
    """Return a field of an example, or raise an error that lists the existing fields."""
    try:
        return example[field]
    except KeyError:
        raise MissingFieldError(
            f"The examples have no field {field!r}, but {', '.join(map(repr, example))}: name one "
            "of these."
        ) from None


def column_values(column: Any) -> Any:
    """Return a column of a data frame or table as an array or a list; any other value as it is."""
    if hasattr(column, "null_count") and hasattr(column, "to_pylist"):  # pyarrow
        return column.to_pylist() if column.null_count else column.to_numpy(zero_copy_only=False)
    return column.to_numpy() if hasattr(column, "to_numpy") else column


def column_array(column: Any) -> NDArray[Any]:
    """Return a column as an array; in a data frame, one of arrays has objects."""
    dtype = getattr(column, "dtype", None)
    if dtype is None or (np.dtype(dtype).kind == "O" and isinstance(column[0], np.ndarray)):
        return stack_values(column)
    return np.asarray(column)


def stack_values(values: Sequence[Any]) -> NDArray[Any]:
    """Stack values to an array `[examples, ...]`, or to one of objects if their shapes differ."""
    arrays = [host_array(value, "A value of the examples") for value in values]
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    objects = np.empty(len(arrays), object)
    objects[:] = arrays
    return objects


def _columns(source: Any) -> Mapping[str, Any] | None:
    """Return the columns of a dict, a data frame, a table or a structured array, or None."""
    names: Any = None
    if isinstance(source, Mapping):
        names = list(source)
    elif isinstance(source, np.ndarray):
        names = source.dtype.names
    elif hasattr(source, "to_pydict"):  # pyarrow
        names = source.column_names
    elif hasattr(source, "to_numpy") and hasattr(source, "columns"):  # pandas and Polars
        names = list(source.columns)
    return None if names is None else {name: column_values(source[name]) for name in names}
