"""read_arrow and stream_arrow: Arrow IPC and Feather; local files are memory-mapped."""

from collections.abc import Iterator

import pyarrow as pa
from pyarrow import feather, ipc

from fedpax.user_files.finding import DataFile, is_url
from fedpax.user_files.formats import ReadOptions


def read_arrow(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read an Arrow IPC file, an IPC stream (as Hugging Face writes it), or Feather."""
    del options
    source = file.open_seekable() if is_url(file.path) else pa.memory_map(file.path)
    start = source.read(6)
    source.seek(0)
    if start == b"ARROW1":
        return ipc.open_file(source).read_all()
    if start[:4] == b"FEA1":
        return feather.read_table(source)
    return ipc.open_stream(source).read_all()


def stream_arrow(file: DataFile, options: ReadOptions) -> Iterator[pa.Table]:
    """Read the batches of a file one after another."""
    for batch in read_arrow(file, options).to_batches():
        yield pa.Table.from_batches([batch])
