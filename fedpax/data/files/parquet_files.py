"""read_parquet: Parquet, parsed by pyarrow."""

import pyarrow as pa
from pyarrow import parquet

from fedpax.data.files.finding import DataFile
from fedpax.data.files.formats import ReadOptions


def read_parquet(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read Parquet."""
    with file.open_seekable() as opened:
        return parquet.ParquetFile(opened).read(columns=list(options.columns) or None)
