"""Gatherer: rows of a column that is in several batches, as one NumPy array."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int64
from numpy.typing import NDArray

from fedpax.user_files.columns import is_number, to_numpy

_WIDE = 256  # bytes of a row from which one copy is faster than sorting the rows by batch


class Rows:
    """Rows to gather, divided by the batch that holds them.

    Args:
        positions: their numbers in the table.
        ends: the end of each batch.
    """

    def __init__(
        self, positions: Int64[np.ndarray, " n"], ends: Int64[np.ndarray, " batches"]
    ) -> None:
        batch = np.searchsorted(ends, positions, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        self.within = positions - starts[batch]
        self.count = len(positions)
        # Runs of consecutive rows in one batch: those of a client.
        cuts = np.concatenate([[0], np.flatnonzero(batch[1:] != batch[:-1]) + 1, [len(batch)]])
        self.runs = [
            (int(batch[a]), slice(a, b))
            for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
            if b > a
        ]
        order = np.argsort(batch.astype(np.uint16) if len(ends) < 2**16 else batch, kind="stable")
        found, first = np.unique(batch[order], return_index=True)
        self.order = order
        self.by_batch = [
            (int(number), order[a:b])
            for number, a, b in zip(found, first, [*first, len(order)][1:], strict=True)
        ]


class ColumnGatherer:
    """A column, whose numbers are viewed in each batch without a copy.

    Args:
        chunks: the column in each batch.
        masked: return masked arrays.
    """

    def __init__(self, chunks: Sequence[Any], masked: bool) -> None:
        self._chunks = chunks
        self._masked = masked
        self._views: list[NDArray[Any]] | None = None
        kind = chunks[0].type
        if isinstance(kind, pa.FixedShapeTensorType):
            kind = kind.value_type
        if not masked and is_number(kind):
            self._views = [to_numpy(chunk) for chunk in chunks]

    def gather(self, rows: Rows) -> NDArray[Any]:
        """Return the values of rows, in a new array."""
        if self._views is None:
            return self._gather_arrow(rows)
        shape = self._views[0].shape[1:]
        values = np.empty((rows.count, *shape), self._views[0].dtype)
        if values.itemsize * int(np.prod(shape)) >= _WIDE:
            for batch, run in rows.runs:
                np.take(self._views[batch], rows.within[run], 0, values[run], "clip")
        else:
            for batch, chosen in rows.by_batch:
                values[chosen] = self._views[batch][rows.within[chosen]]
        return values

    def _gather_arrow(self, rows: Rows) -> NDArray[Any]:
        parts = [
            self._chunks[batch].take(pa.array(rows.within[chosen]))
            for batch, chosen in rows.by_batch
        ]
        if len(parts) == 1:
            return to_numpy(parts[0], masked=self._masked)  # one batch: in the order of the rows
        together = pa.chunked_array(parts, self._chunks[0].type)
        values = to_numpy(together, masked=self._masked)
        back = np.empty(rows.count, np.int64)
        back[rows.order] = np.arange(rows.count)
        return values[back]
