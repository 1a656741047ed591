"""The formats of files, by suffix; a format's module is imported when a file has its suffix."""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpax.errors import ArgumentError
from fedpax.paths import expand_home
from fedpax.user_files.finding import PLACEHOLDER, DataFile, is_url
from fedpax.user_files.folders import is_data_folder

if TYPE_CHECKING:
    import pyarrow

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm")

FORMATS = {
    ".csv": "csv_files:read_csv",
    ".tsv": "csv_files:read_csv",
    ".tab": "csv_files:read_csv",
    ".parquet": "parquet_files:read_parquet",
    ".pq": "parquet_files:read_parquet",
    ".jsonl": "json_files:read_json_lines",
    ".ndjson": "json_files:read_json_lines",
    ".json": "json_files:read_json",
    ".arrow": "arrow_files:read_arrow",
    ".feather": "arrow_files:read_arrow",
    ".npz": "array_files:read_npz",
    ".tfrecord": "tfrecord_files:read_tfrecord",
    ".tfrecords": "tfrecord_files:read_tfrecord",
    ".tar": "tar_files:read_tar",
    ".bin": "token_files:read_bin",
    ".npy": "token_files:read_npy",
    ".h5": "array_files:read_hdf5",
    ".hdf5": "array_files:read_hdf5",
    **dict.fromkeys(IMAGES, "image_files:read_images"),
}
"""For each suffix the function that reads a file as a table."""


STREAMS = {
    "read_csv": "csv_files:stream_csv",
    "read_parquet": "parquet_files:stream_parquet",
    "read_json_lines": "json_files:stream_json_lines",
    "read_arrow": "arrow_files:stream_arrow",
    "read_tfrecord": "tfrecord_files:stream_tfrecord",
    "read_tar": "tar_files:stream_tar",
}
"""For each reader the function that reads a file in parts; files of other formats fit in memory."""

FILE_NAME = (
    r".+\.(?:array_record|(?:"
    + "|".join(suffix[1:] for suffix in FORMATS)
    + r")(?:\.(?:gz|zst|bz2))?)"
)
"""A regular expression for the names of files, which may have characters that others have not."""


class TypeChangedError(Exception):
    """A part of a file has another type in a column than the parts before.

    Attributes:
        path: the file.
        column: the column.
        type: the `pyarrow.DataType` of the whole column.
    """

    def __init__(self, path: str, column: str, type: Any) -> None:
        super().__init__(path, column, type)
        self.path, self.column, self.type = path, column, type


class BadRows:
    """Count the rows that are skipped because they are damaged, and keep the first of each file.

    Attributes:
        count: the number of rows, by file.
        first: the beginning of the first row, by file.
    """

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def clear(self) -> None:
        """Begin again."""
        self.count.clear()
        self.first.clear()

    def skip(self, path: str, text: str) -> str:
        """Count a row, and return pyarrow's word for skipping it."""
        self.count[path] = self.count.get(path, 0) + 1
        self.first.setdefault(path, text[:80])
        return "skip"


class ReadOptions(NamedTuple):
    """How files are read."""

    columns: tuple[str, ...]  # the columns to read. Empty: all.
    # for a column the Arrow type that replaces the one found in the file
    types: "Mapping[str, pyarrow.DataType]"
    delimiter: str | None  # the character between the columns of CSV. None: a comma, in TSV a tab.
    # the height and width to which images are resized. None: images have one size.
    image_size: tuple[int, int] | None = None
    # counts damaged rows, which are skipped. None: they are errors.
    bad_rows: BadRows | None = None


Reader = Callable[[Any, ReadOptions], Any]
"""A function that reads a `DataFile` as a `pyarrow.Table`; that of images reads a list of files."""


def is_files(name: str) -> bool:
    """Return whether a name for `load` is files, not a data set of TFDS.

    Example:
        >>> is_files("hospitals/*.csv.gz"), is_files("c4/en:3.1.0")
        (True, False)
    """
    file = DataFile(name, {})
    is_pattern = "*" in name or PLACEHOLDER.search(name) is not None
    if file.suffix in FORMATS or is_pattern or is_url(name):
        return True
    path = expand_home(name)
    return path.is_file() or is_data_folder(path)


def is_shard(file: DataFile) -> bool:
    """Return whether a file is a part of a data set, not a client: such parts have equal sizes."""
    return file.is_shard or file.suffix in (".tfrecord", ".tfrecords", ".tar", ".bin", ".npy")


def is_image(file: DataFile) -> bool:
    """Return whether a file is one image, and so one example."""
    return file.suffix in IMAGES


def find_reader(file: DataFile) -> Reader:
    """Return the function that reads a file."""
    if file.suffix not in FORMATS:
        raise ArgumentError(
            f"{file.path} has the suffix {file.suffix!r}, expected one of {', '.join(FORMATS)}, "
            "alone or before .gz, .zst or .bz2. Rename the file, or name others."
        )
    return _import(FORMATS[file.suffix])


def find_stream(file: DataFile) -> Reader | None:
    """Return the function that reads a file in parts, or None if its format is read at once."""
    name = FORMATS.get(file.suffix, "").partition(":")[2]
    return _import(STREAMS[name]) if name in STREAMS else None


def _import(place: str) -> Reader:
    module, _, function = place.partition(":")
    reader: Reader = getattr(
        importlib.import_module(f"fedpax.user_files.readers.{module}"), function
    )
    return reader
