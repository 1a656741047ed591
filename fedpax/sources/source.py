"""Source: the examples of a split, each read from disk when it is indexed."""

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedpax.sources.client_starts import Starts
from fedpax.sources.text_records import TextRecords


class Source(Sequence[dict[str, Any]]):
    """The examples of a split: a sequence of dicts, each read from disk when it is indexed.

    Attributes:
        name: data set, configuration, version and split, such as
            `"stdlib_text/cpython-3.11.7/1.0.0:train"`.
        folder: the folder of the prepared data set.
        client_starts: index of each client's first example, and at the end the number of examples,
            if the data set is sorted by the field `client` and was prepared with this index. None
            otherwise.
        client_names: the name of each client in `client_starts`, if the source was made from files.
            None otherwise.
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

        For a field with few distinct values, such as a label or a client's name, this is much
        cheaper than reading the examples: no other field is decoded, and each distinct value is
        decoded once.

        Args:
            field: the name of the field.

        Yields:
            The field's value in each example; equal values may be the same object.

        Raises:
            KeyError: the examples have no such field.
            OSError: the prepared files cannot be read.

        Example:
            >>> from fedpax.data import load
            >>> source = load("stdlib_text", "heldout")
            >>> list(source.column("client")) == [example["client"] for example in source]
            True
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
