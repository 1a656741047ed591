"""Source: the examples of a split, each read from disk when it is indexed."""

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from fedpax.errors import ArgumentError, ArgumentTypeError, MissingFieldError
from fedpax.files import check_fetched
from fedpax.primitives.casts import host_array
from fedpax.user_paths import find_paths

_FILE = "client_starts.npz"

Starts = Int64[np.ndarray, " clients_and_1"]
"""Index of each client's first example, and at the end the number of examples."""


def write_client_starts(folder: Path, starts: Mapping[str, Sequence[int]]) -> None:
    """Write the index of each client's first example, ascending, for each split."""
    arrays: dict[str, Any] = {
        split: np.array(indices, np.int64) for split, indices in starts.items()
    }
    np.savez(folder / _FILE, **arrays)


def read_client_starts(folder: Path, parts: Sequence[tuple[str, int, int]]) -> Starts | None:
    """Read where each client's examples begin in parts of splits, counted over all parts."""
    # A client whose examples are in two parts, or in two splits, is two clients. None if the data
    # set has no such file.
    path = folder / _FILE
    if not path.exists():
        return None
    pieces, total = [np.zeros(1, np.int64)], 0
    with np.load(path) as splits:
        for split, begin, end in parts:
            starts = splits[split]
            inside = starts[(starts > begin) & (starts < end)]
            pieces.append(np.append(inside, end) - begin + total)
            total += end - begin
    return np.concatenate(pieces)


class Source(Sequence[dict[str, Any]]):
    """The examples of a split: a sequence of dicts, each read from disk when it is indexed.

    Attributes:
        name: data set, configuration, version and split, such as
            `"stdlib_text/cpython-3.11.7/1.0.0:train"`.
        folder: the folder of the prepared data set.
        client_starts: index of each client's first example, and at the end the number of examples;
            None if the data set was prepared without this index.
        client_names: the name of each client in `client_starts`; None if not made from files.
    """

    client_names: Sequence[Any] | None = None

    def __init__(
        self, name: str, folder: Path, records: Any, client_starts: Starts | None = None
    ) -> None:
        self.name = name
        self.folder = folder
        self.client_starts = client_starts
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        """Return an example: a dict of NumPy values by field, with texts as bytes."""
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(
                f"Index {position} is out of range: {self.name} has {len(self)} examples."
            )
        return self._read(self._records.__getitem__, position % len(self))

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return several examples, read in parallel."""
        positions = [operator.index(index) for index in indices]
        in_range = all(-len(self) <= position < len(self) for position in positions)
        if in_range and hasattr(self._records, "__getitems__"):
            with contextlib.suppress(Exception):  # one by one, to name the example
                records: Sequence[Any] = self._records.__getitems__(
                    [p % len(self) for p in positions]
                )
                return records
        return [self[position] for position in positions]

    def column(self, field: str) -> Iterable[Any]:
        """Yield one field of every example, in order.

        This is much cheaper than reading the examples: no other field is decoded, and each distinct
        value once. Equal values may be the same object.

        Raises:
            KeyError: the examples have no such field.
            OSError: the prepared files cannot be read.
        """
        if isinstance(self._records, TextRecords | list):
            yield from (self[index][field] for index in range(len(self)))
            return
        from tensorflow_datasets.proto import tf_example_pb2

        def read_record(index: int) -> Any:
            record = self._records.data_source[index]
            return tf_example_pb2.Example.FromString(record).features.feature

        decoded: dict[bytes, Any] = {}
        for index in range(len(self)):
            features = self._read(read_record, index)
            if field not in features:  # stored as several features, or missing
                yield self[index][field]
                continue
            value = features[field].SerializeToString()
            if value not in decoded:
                decoded[value] = self[index][field]
            yield decoded[value]

    def _read(self, read: Callable[[int], Any], index: int) -> Any:
        try:
            return read(index)
        except Exception as error:  # including the own types of array_record and protobuf
            raise OSError(
                f"Example {index} of {self.name} cannot be read, so the files in {self.folder} "
                f"are damaged: delete that folder and load again. ({one_line(error)})"
            ) from error

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {len(self)} examples, {str(self.folder)!r})"


def one_line(error: BaseException) -> str:
    """Return an error's type and message on one line, at most 500 characters of it."""
    error = error.__cause__ or error  # TFDS wraps errors to add the arguments of its calls
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')[:500]}."


# Texts in array_record files that TFDS did not prepare.
SUFFIX = ".array_record"


class TextRecords(Sequence[dict[str, Any]]):
    """The records of array_record files, in the order of the files' names, as dicts."""

    # A record is a text in UTF-8, which becomes the field `"text"` (as bytes), or a serialized
    # `tf.train.Example`, whose features become fields: of one value, or a list. The first record
    # decides for all. A path that exists as it is written is no pattern.

    def __init__(self, pattern: str) -> None:
        paths = find_paths(pattern)
        self.paths = [str(path) for path in paths]
        if not self.paths:
            raise FileNotFoundError(
                f"No file matches {pattern!r}: name files that end with {SUFFIX}. {{split}} in the "
                "name stands for the split, such as 'corpus/{split}-*.array_record'."
            )
        for path in paths:
            check_fetched(path)
        from grain.sources import ArrayRecordDataSource  # here because it is slow to import

        self._files = ArrayRecordDataSource(self.paths)
        self._are_examples = len(self._files) > 0 and bool(example_features(self._files[0]))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        """Return a record as a dict."""
        return self._decode(self._files[index])

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several records, read in parallel."""
        return [self._decode(record) for record in self._files.__getitems__(indices)]

    def _decode(self, record: bytes) -> dict[str, Any]:
        return (example_features(record) or {}) if self._are_examples else {"text": record}


def example_features(record: bytes) -> dict[str, Any] | None:
    """Return the features of a `tf.train.Example`; None if the record is not one."""
    from tensorflow_datasets.proto import tf_example_pb2

    example = tf_example_pb2.Example()
    try:
        example.ParseFromString(record)
    except Exception:  # protobuf's own type, which has no stubs
        return None
    fields: dict[str, Any] = {}
    for name, feature in example.features.feature.items():
        list_name = feature.WhichOneof("kind")
        values = getattr(feature, list_name).value if list_name else []
        fields[name] = values[0] if len(values) == 1 else list(values)
    return fields or None


# as_examples: what users have in memory (records, columns, data frames) as a sequence of dicts.
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
    # `source`: a sequence of dicts, which is returned itself; a dict of columns; a data frame of
    # pandas or Polars; a table of pyarrow; or a NumPy array with named fields.
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
