"""The formats of files, by suffix; a format's module is imported when a file has its suffix."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpax.data.files.finding import PLACEHOLDER, DataFile, is_url
from fedpax.errors import ArgumentError

if TYPE_CHECKING:
    import pyarrow

FORMATS = {
    ".csv": "fedpax.data.files.csv_files:read_csv",
    ".tsv": "fedpax.data.files.csv_files:read_csv",
    ".tab": "fedpax.data.files.csv_files:read_csv",
    ".parquet": "fedpax.data.files.parquet_files:read_parquet",
    ".pq": "fedpax.data.files.parquet_files:read_parquet",
}
"""For each suffix the function that reads a file as a table."""


class ReadOptions(NamedTuple):
    """How files are read.

    Attributes:
        columns: the columns to read. Empty: all.
        types: for a column the Arrow type that replaces the one found in the file.
        delimiter: the character between the columns of CSV. None: a comma, in TSV a tab.
    """

    columns: tuple[str, ...]
    types: "Mapping[str, pyarrow.DataType]"
    delimiter: str | None


Reader = Callable[[DataFile, ReadOptions], Any]
"""A function that reads a file as a `pyarrow.Table`."""


def is_files(name: str) -> bool:
    """Return whether a name for `load` is files, not a data set of TFDS.

    Example:
        >>> is_files("hospitals/*.csv.gz"), is_files("c4/en:3.1.0")
        (True, False)
    """
    file = DataFile(name, {})
    is_pattern = "*" in name or PLACEHOLDER.search(name) is not None
    return file.suffix in FORMATS or is_pattern or is_url(name) or Path(name).is_file()


def find_reader(file: DataFile) -> Reader:
    """Return the function that reads a file.

    Raises:
        ValueError: the suffix is unknown.
    """
    if file.suffix not in FORMATS:
        raise ArgumentError(
            f"{file.path} has the suffix {file.suffix!r}, expected one of {', '.join(FORMATS)}, "
            "alone or before .gz, .zst or .bz2. Rename the file, or name others."
        )
    module, _, function = FORMATS[file.suffix].partition(":")
    reader: Reader = getattr(importlib.import_module(module), function)
    return reader
