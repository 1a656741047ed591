"""read_parquet, read_arrow and their streams: files of Arrow tables, read by pyarrow."""

from collections.abc import Iterator

import pyarrow as pa
from pyarrow import feather, ipc, parquet

from fedpax.user_files.arrow_numpy import is_pandas_index
from fedpax.user_files.finding import DataFile, is_url
from fedpax.user_files.formats import ReadOptions

_BATCH_BYTES = 1 << 23
_BATCH_ROWS = 1 << 16


def parquet_bytes(file: DataFile) -> int:
    """Return the bytes of the columns of Parquet, as its metadata tell them."""
    return _num_bytes(parquet.read_metadata(file.path))


def _num_bytes(about: parquet.FileMetaData) -> int:
    return sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))


def read_parquet(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read Parquet."""
    with file.open_seekable() as opened:
        content = parquet.ParquetFile(opened)
        return content.read(columns=_columns(content, options))


def stream_parquet(file: DataFile, options: ReadOptions) -> Iterator[pa.Table]:
    """Read Parquet in batches of rows."""
    with file.open_seekable() as opened:
        # With pre_buffer, pyarrow holds all that it has read until the file's end.
        content = parquet.ParquetFile(opened, pre_buffer=False)
        columns = _columns(content, options)
        about = content.metadata
        rows = _BATCH_BYTES * about.num_rows // max(1, _num_bytes(about))
        for batch in content.iter_batches(min(_BATCH_ROWS, max(1, rows)), columns=columns):
            yield pa.Table.from_batches([batch])


def _columns(content: parquet.ParquetFile, options: ReadOptions) -> list[str] | None:
    """Return the stated columns, or all but an index of pandas; None: all."""
    names = content.schema_arrow.names
    data = [name for name in names if not is_pandas_index(name)]
    return list(options.columns) or (data if len(data) < len(names) else None)


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
