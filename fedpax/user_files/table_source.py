"""TableSource: an Arrow table as a source of examples, indexed by client."""

import contextlib
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int64
from numpy.typing import ArrayLike, NDArray

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.sources.reused_memory import ReusedMemory
from fedpax.sources.source import Source, Starts
from fedpax.user_files.arrow_numpy import to_numpy
from fedpax.user_files.image_hashes import is_hash, visible, without_hashes
from fedpax.user_files.row_gatherers import ColumnGatherer, RecordGatherer, Records, Rows


class TableSource(Source):
    """The examples of an Arrow table, sorted by client if they have clients.

    `table` is a `pyarrow.Table`; `stored` has the hashes of images, by which images are held out.
    `locate`, `index -> text`, names an example by its place in its file.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        table: pa.Table,
        *,
        client: str | None = None,
        client_starts: Starts | None = None,
        client_names: Sequence[Any] | None = None,
        label: str | None = None,
        records: Sequence[Records] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.stored, self.notes = table, tuple(notes)
        table = without_hashes(table)
        super().__init__(name, folder, table, client_starts)
        self.table = table
        self.fields = tuple(table.column_names)
        self.client = client
        self.client_names = client_names
        self.label = label
        self.locate: Callable[[int], str] | None = None
        self._records = records  # of the rows of the table; of each shard
        self._batches = [batch for batch in table.to_batches() if len(batch)]
        self._ends = np.cumsum([len(batch) for batch in self._batches])
        self._gatherers: dict[str, ColumnGatherer | RecordGatherer] = {}

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        """Return an example: a dict of values by column, in which None is missing."""
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        columns = {name: _values(array) for name, array in self.take(indices).items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def column(self, field: str) -> NDArray[Any]:
        """Return one column of all examples, masked if values are missing."""
        if field not in self.fields:
            raise KeyError(
                f"{self.name} has no column {field!r}, but {', '.join(map(repr, self.fields))}: "
                "name one of these."
            )
        return to_numpy(self.table.column(field))

    def take(self, indices: ArrayLike) -> Mapping[str, NDArray[Any]]:
        """Return some examples, by column; a column is read when it is indexed."""
        return self.reader()(indices)

    def reader(self) -> Callable[[ArrayLike], Mapping[str, NDArray[Any]]]:
        """Return a function like `take`, whose arrays reuse memory."""
        memory: defaultdict[str, ReusedMemory] = defaultdict(ReusedMemory)

        def take(indices: ArrayLike) -> Mapping[str, NDArray[Any]]:
            positions = self._check(indices)
            in_batches = functools.cache(lambda: Rows(positions, self._ends))
            in_records = functools.cache(
                lambda: Rows(positions, np.cumsum([len(part.rows) for part in self._records]))
            )

            def gather(name: str) -> NDArray[Any]:
                gatherer = self._gatherer(name)
                is_record = isinstance(gatherer, RecordGatherer)
                return gatherer.gather(in_records() if is_record else in_batches(), memory[name])

            return _Taken(self.fields, gather)

        return take

    def take_table(self, indices: ArrayLike) -> pa.Table:
        """Return some examples as an Arrow table, whose columns are in one piece."""
        rows = Rows(self._check(indices), self._ends)
        parts = [self._batches[k].take(pa.array(within)) for k, _, within in rows.by_batch]
        table = pa.Table.from_batches(parts, self.table.schema)
        if len(parts) > 1:
            table = table.combine_chunks().take(pa.array(rows.back))
        return table

    def select(self, columns: Sequence[str]) -> "TableSource":
        """Return the source with some of its columns and those of client and label."""
        check_columns(self.fields, {f"columns[{k}]": c for k, c in enumerate(columns)}, self.name)
        kept = [*dict.fromkeys([*columns, self.client, self.label])]
        hashes = filter(is_hash, self.stored.column_names)
        selected = TableSource(
            self.name,
            self.folder,
            self.stored.select([*(name for name in kept if name is not None), *hashes]),
            client=self.client,
            client_starts=self.client_starts,
            client_names=self.client_names,
            label=self.label,
            records=self._records,
            notes=self.notes,
        )
        selected.locate = self.locate
        return selected

    def client_table(self, client: int) -> pa.Table:
        """Return the examples of a client by its number, a slice of `table` without a copy."""
        if self.client_starts is None:
            raise ArgumentError(
                f"{self.name} has no clients, expected a source that was loaded with client=..., "
                "such as load(files, client='hospital')."
            )
        begin, end = self.client_starts[range(len(self.client_starts) - 1)[client] :][:2].tolist()
        return self.table.slice(begin, end - begin)

    def _check(self, indices: ArrayLike) -> Int64[np.ndarray, " n"]:
        given = np.asarray(indices)
        if given.size and given.dtype.kind not in "iu":
            raise ArgumentTypeError(
                f"take() got indices of type {given.dtype}, expected integers. Pass the places of "
                "a mask: np.flatnonzero(mask)."
            )
        positions = given.astype(np.int64, copy=False)
        lowest, highest = positions.min(initial=0), positions.max(initial=-1)
        if lowest < -len(self) or highest >= len(self):
            outside = highest if highest >= len(self) else lowest
            raise IndexError(
                f"Index {outside} is out of range: {self.name} has {len(self)} examples."
            )
        return (
            np.where(positions < 0, positions + len(self), positions) if lowest < 0 else positions
        )

    def _gatherer(self, field: str) -> ColumnGatherer | RecordGatherer:
        if field not in self._gatherers:
            if self._records and all(field in part.rows.dtype.fields for part in self._records):
                self._gatherers[field] = RecordGatherer(self._records, field)
                return self._gatherers[field]
            chunks = [batch.column(field) for batch in self._batches]
            masked = self.table.column(field).null_count > 0
            self._gatherers[field] = ColumnGatherer(chunks, masked)
        return self._gatherers[field]

    def __repr__(self) -> str:
        clients = "" if self.client_starts is None else f", {len(self.client_starts) - 1} clients"
        return f"TableSource({self.name!r}, {len(self)} examples{clients})"


class _Taken(Mapping[str, NDArray[Any]]):
    """The columns of some examples, each gathered at its first use."""

    def __init__(self, fields: Sequence[str], gather: Callable[[str], NDArray[Any]]) -> None:
        self._fields, self._gather = fields, gather
        self._columns: dict[str, NDArray[Any]] = {}

    def __getitem__(self, field: str) -> NDArray[Any]:
        if field not in self._columns:
            if field not in self._fields:
                raise KeyError(field)
            self._columns[field] = self._gather(field)
        return self._columns[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class ClientNames(Sequence[Any]):
    """The names of clients, held by Arrow: a million of them need no Python objects."""

    def __init__(self, names: Any) -> None:
        if getattr(names.type, "unit", None) == "ns":  # Python's times have microseconds
            names = names.cast(pa.string())
        if pa.types.is_binary(names.type) or pa.types.is_large_binary(names.type):
            with contextlib.suppress(pa.ArrowInvalid):  # not UTF-8
                names = names.cast(pa.large_string())
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        """Return a name, or a list of them for a slice."""
        names = self._names[index]
        return names.to_pylist() if isinstance(index, slice) else names.as_py()

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:5])) + (", ..." if len(self) > 5 else "")
        return f"ClientNames([{shown}])"


def _values(array: NDArray[Any]) -> Sequence[Any]:
    if not isinstance(array, np.ma.MaskedArray):
        return list(array)
    mask = np.ma.getmaskarray(array).reshape(len(array), -1).any(axis=1)
    return [
        None if missing else value
        for value, missing in zip(array.data, np.atleast_1d(mask), strict=True)
    ]


_REMEDIES = {"client": " Name one of them, or set client=None: each file is then a client."}


def check_columns(fields: Sequence[str], wanted: Mapping[str, str | None], name: str) -> None:
    """Check that a table has columns."""
    fields = visible(fields)
    for argument, column in wanted.items():
        if column is not None and column not in fields:
            raise ArgumentError(
                f"{argument}={column!r} is not a column of {name}, expected one of "
                f"{', '.join(map(repr, fields))}.{_REMEDIES.get(argument, '')}"
            )
