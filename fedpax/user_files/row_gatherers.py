"""Gatherer: rows of a column that is in several batches, as one NumPy array."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Int64
from numpy.typing import NDArray

from fedpax.sources.reused_memory import ReusedMemory
from fedpax.user_files.arrow_numpy import is_integer_or_float, to_numpy

_CLOSE = 4  # rows: so many of a client are likely to share a line of the cache
_WIDE = 256  # bytes of a row from which one copy is faster than sorting the rows by batch


class Rows:
    """Rows to gather, divided by the batch that holds them."""

    def __init__(
        self, positions: Int64[np.ndarray, " n"], ends: Int64[np.ndarray, " batches"]
    ) -> None:
        self.count = len(positions)
        if len(ends) == 1:
            self.within = positions
            return
        self._batch = np.searchsorted(ends, positions, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        self.within = positions - starts.take(self._batch)

    @functools.cached_property
    def _batch(self) -> Int64[np.ndarray, " n"]:
        return np.zeros(self.count, np.int64)  # one batch

    def places(
        self, starts: Int64[np.ndarray, " batches"], size: int = 1
    ) -> Int64[np.ndarray, " n"]:
        """Return where rows of a size begin, of batches that begin at given places."""
        places = starts.take(self._batch)
        places += self.within if size == 1 else size * self.within
        return places

    @functools.cached_property
    def runs(self) -> list[tuple[int, slice]]:
        """Runs of consecutive rows in one batch, such as a client's rows."""
        cuts = _cuts(self._batch)
        return [(int(self._batch[a]), slice(a, b)) for a, b in itertools.pairwise(cuts) if b > a]

    @functools.cached_property
    def order(self) -> Int64[np.ndarray, " n"]:
        """The places of the rows, sorted by batch."""
        # uint16 is sorted in linear time.
        batch = self._batch if self._batch.max(initial=0) >= 2**16 else self._batch.astype("u2")
        return np.argsort(batch, kind="stable")

    @functools.cached_property
    def back(self) -> Int64[np.ndarray, " n"]:
        """The place of each row in `order`."""
        back = np.empty(self.count, np.int64)
        back[self.order] = np.arange(self.count)
        return back

    @functools.cached_property
    def by_batch(self) -> list[tuple[int, slice, Int64[np.ndarray, " rows"]]]:
        """For each batch its slice of `order`, and its rows there."""
        batch, within = self._batch[self.order], self.within[self.order]
        parts = [slice(a, b) for a, b in itertools.pairwise(_cuts(batch)) if b > a]
        return [(int(batch[part.start]), part, within[part]) for part in parts]


def _cuts(batch: NDArray[Any]) -> list[int]:
    """Return where the batch of consecutive rows changes, with both ends."""
    return [0, *(np.flatnonzero(batch[1:] != batch[:-1]) + 1).tolist(), len(batch)]


class ColumnGatherer:
    """A column, whose numbers are viewed in each batch without a copy."""

    def __init__(self, chunks: Sequence[Any], masked: bool) -> None:
        self._chunks = chunks
        self._masked = masked
        self._views: list[NDArray[Any]] | None = None
        data_type = chunks[0].type
        if isinstance(data_type, pa.FixedShapeTensorType):
            data_type = data_type.value_type
        self._mapped: _MappedRows | None = None
        if not masked and is_integer_or_float(data_type):
            self._views = [to_numpy(chunk) for chunk in chunks]
            self._mapped = _view_together(chunks, self._views)

    def gather(self, rows: Rows, memory: ReusedMemory) -> NDArray[Any]:
        """Return the values of rows, in memory that nothing refers to."""
        if self._views is None:
            return self._gather_arrow(rows)
        shape = self._views[0].shape[1:]
        if self._mapped is not None:
            return self._mapped.gather(rows, memory).reshape(rows.count, *shape)
        values = memory.empty((rows.count, *shape), self._views[0].dtype)
        if values.itemsize * int(np.prod(shape)) >= _WIDE:
            for batch, run in rows.runs:
                self._views[batch].take(rows.within[run], 0, values[run], "clip")
        elif len(rows.by_batch) == 1:
            self._views[rows.by_batch[0][0]].take(rows.within, 0, values, "clip")
        else:
            in_order = np.empty_like(values)
            for batch, part, within in rows.by_batch:
                self._views[batch].take(within, 0, in_order[part], "clip")
            values[rows.order] = in_order
        return values

    def _gather_arrow(self, rows: Rows) -> NDArray[Any]:
        parts = [self._chunks[batch].take(pa.array(within)) for batch, _, within in rows.by_batch]
        if len(parts) == 1:
            return to_numpy(parts[0], masked=self._masked)  # one batch: `order` changes nothing
        together = pa.chunked_array(parts, self._chunks[0].type)
        return to_numpy(together, masked=self._masked)[rows.back]


class Records(NamedTuple):
    """The scalars of examples side by side, of a prepared folder or of one of its shards."""

    rows: NDArray[Any]  # a structured array `[examples]`, in a memory map
    missing: Mapping[str, int]  # the byte of a record that is 1 if a column's value is missing


class _Field:
    """A field of records."""

    def __init__(self, rows: NDArray[Any], kind: np.dtype[Any], offset: int) -> None:
        self._values = np.asarray(rows).view(kind)
        self._first, self._step = offset // kind.itemsize, rows.itemsize // kind.itemsize

    def take(self, within: Int64[np.ndarray, " rows"], out: NDArray[Any]) -> None:
        places = self._step * within
        places += self._first
        self._values.take(places, 0, out, "clip")


class RecordGatherer:
    """A column of scalars in the records of a prepared folder, or of each of its shards."""

    def __init__(self, records: Sequence[Records], name: str) -> None:
        fields: Any = [part.rows.dtype.fields for part in records]
        self._dtype: np.dtype[Any] = fields[0][name][0]
        self._values = [
            _Field(part.rows, *field[name][:2]) for part, field in zip(records, fields, strict=True)
        ]
        self._missing = [
            _Field(part.rows, np.dtype(np.bool_), part.missing[name])
            if name in part.missing
            else None
            for part in records
        ]

    def gather(self, rows: Rows, memory: ReusedMemory) -> NDArray[Any]:
        """Return the values of rows, which are divided by shard; masked if some are missing."""
        values = _take(self._values, rows, memory.empty((rows.count,), self._dtype))
        if not any(self._missing):
            return values
        mask = _take(self._missing, rows, np.zeros(rows.count, np.bool_))
        return np.ma.MaskedArray(values, mask if mask.any() else np.ma.nomask)


def _take(fields: Sequence[_Field | None], rows: Rows, out: NDArray[Any]) -> NDArray[Any]:
    """Write a field of rows, each in the records of its shard."""
    if len(fields) == 1 and fields[0] is not None:
        fields[0].take(rows.within, out)
        return out
    in_order = np.zeros_like(out)
    for shard, part, within in rows.by_batch:
        if (field := fields[shard]) is not None:
            field.take(within, in_order[part])
    out[rows.order] = in_order
    return out


def _view_together(chunks: Sequence[Any], views: Sequence[NDArray[Any]]) -> "_MappedRows | None":
    """View the batches of a memory map as one array, which one call gathers from."""
    if len(chunks) == 1:
        return None
    storage = [getattr(chunk, "storage", chunk) for chunk in chunks]
    whole = _whole_buffer(storage[0].buffers()[-1])
    starts = np.array([view.ctypes.data for view in views]) - whole.address
    if starts.min() < 0 or (starts + [view.nbytes for view in views]).max() > whole.size:
        return None
    return _MappedRows(whole, views[0], starts)


class _MappedRows:
    """The rows of a column whose batches are in one buffer, between other columns."""

    def __init__(
        self, whole: Any, like: NDArray[Any], starts: Int64[np.ndarray, " batches"]
    ) -> None:
        size = like.nbytes // len(like)
        first = int(starts[0]) % size
        self._dtype, self._size, self._is_number = like.dtype, size, like.ndim == 1
        self._on_grid = not ((starts - first) % size).any()  # as `RowGrid` places them
        unit, first = (size, first) if self._on_grid else (1, 0)
        self._starts = (starts - first) // unit
        kind = like.dtype if self._is_number and self._on_grid else np.dtype(f"V{size}")
        count = (whole.size - first - size) // unit + 1
        self._values: NDArray[Any] = np.ndarray((count,), kind, whole, first, (unit,))

    def gather(self, rows: Rows, memory: ReusedMemory) -> NDArray[Any]:
        if not self._on_grid:  # `take` would copy all of them first
            taken: NDArray[Any] = self._values[rows.places(self._starts, self._size)]
            return taken.view(self._dtype)
        places = rows.places(self._starts)
        if self._is_number:
            self._values.take(places[::_CLOSE], mode="clip")  # misses of the cache overlap
        values = memory.empty((rows.count,), self._values.dtype)
        return self._values.take(places, 0, values, "clip").view(self._dtype)


def _whole_buffer(buffer: Any) -> Any:
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer
