"""RowGrid: places the widest rows of an Arrow file, such as images, on one grid.

If the distances between rows are multiples of a row's size, one call gathers rows of all batches.
`RowGrid` writes unused metadata of such a length before each batch.
"""

import math
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from fedpax.user_files.columns import is_integer_or_float

_STEP = 8  # bytes: Arrow places batches at multiples of them
_MOST_PADDING = 1 << 20  # bytes of a batch


class RowGrid:
    """The grid of the widest tensors of a file that is being written."""

    def __init__(self, schema: pa.Schema, sink: Any) -> None:
        sizes = {
            column: math.prod(kind.shape) * kind.value_type.bit_width // 8
            for column, kind in enumerate(schema.types)
            if isinstance(kind, pa.FixedShapeTensorType) and is_integer_or_float(kind.value_type)
        }
        self._sink = sink
        self._column = max(sizes, key=lambda column: sizes[column], default=0)
        self._size = sizes.get(self._column, 0)
        self._header = _header_bytes(schema)  # is written with the first batch
        self._first: int | None = None

    def metadata(self, batch: pa.RecordBatch) -> dict[str, str] | None:
        """Return the metadata to write with the next batch; None for a file without tensors."""
        if not self._size:
            return None
        # Where its rows begin, but for the same constant in each batch.
        before = batch.select(list(range(self._column)))
        place = max(self._sink.tell(), self._header) + ipc.get_record_batch_size(before)
        if self._first is None:
            self._first = place
        missing = (self._first - place) % self._size
        paddings = range(missing, missing + _STEP * self._size, self._size)
        padding = next((size for size in paddings if size % _STEP == 0), 0)
        return {"padding": " " * (padding if padding <= _MOST_PADDING else 0)}


def _header_bytes(schema: pa.Schema) -> int:
    empty, sink = pa.RecordBatch.from_pylist([], schema), pa.MockOutputStream()
    with ipc.new_file(sink, schema) as writer:
        writer.write_batch(empty)
        return int(sink.size()) - int(ipc.get_record_batch_size(empty))
