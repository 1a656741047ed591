"""The formats of files, by suffix; a format's module is imported when a file has its suffix."""

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from fedpax.checks import check_distinct
from fedpax.errors import ArgumentError
from fedpax.user_files.finding import DataFile, is_numbered

if TYPE_CHECKING:
    import pyarrow


IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm")


class Format(NamedTuple):
    """The facts of a format; functions of `readers/` are named as `module:function`."""

    read: str  # reads a file
    signature: bytes  # with which each file begins. b"": none
    stream: str | None = None  # reads a file in parts. None: files fit in memory
    kind: str = ""  # names a file in messages, such as "a Parquet file"
    is_shard: bool = False  # a file is a part of a data set, not a client
    varies: bool = False  # an example can lack columns that others of its file have
    can_omit: bool = False  # a file can lack columns whose values are all missing
    misfit: str | None = None  # finds the first value of a column that is not of a type
    size: str | None = None  # estimates the bytes of its columns. None: the bytes of the file
    is_compressed: bool = False  # its columns take more bytes than the file
    is_mapped: bool = False  # it is read from the disk where it is needed
    in_folder: int = 0  # the place of its first suffix in the search of a folder. 0: it is not read


CSV = Format(
    "csv_files:read_csv", b"", "csv_files:stream_csv", misfit="csv_hints:find_misfit", in_folder=4
)
JSON_LINES = Format(
    "json_files:read_json_lines",
    b"",
    "json_files:stream_json_lines",
    varies=True,
    can_omit=True,
    in_folder=3,
)
PARQUET = Format(
    "arrow_files:read_parquet",
    b"PAR1",
    "arrow_files:stream_parquet",
    "a Parquet file",
    size="arrow_files:parquet_bytes",
    in_folder=1,
)
ARROW = Format(
    "arrow_files:read_arrow",
    b"ARROW1",
    "arrow_files:stream_arrow",
    "an Arrow file",
    is_mapped=True,
    in_folder=2,
)
TFRECORD = Format(
    "tfrecord_files:read_tfrecord",
    b"",
    "tfrecord_files:stream_tfrecord",
    is_shard=True,
    varies=True,
)
HDF5 = Format("array_files:read_hdf5", b"\x89HDF", kind="an HDF5 file")
IMAGE = Format("image_files:read_images", b"")
ZIP = b"PK\x03\x04"

FORMATS = {
    ".csv": CSV,
    ".tsv": CSV,
    ".tab": CSV,
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": Format("json_files:read_json", b"", varies=True, can_omit=True),
    ".arrow": ARROW,
    ".feather": ARROW._replace(is_mapped=False, in_folder=0),  # it can be compressed
    ".npz": Format("array_files:read_npz", ZIP, is_compressed=True),
    ".tfrecord": TFRECORD,
    ".tfrecords": TFRECORD,
    ".tar": Format("tar_files:read_tar", b"", "tar_files:stream_tar", is_shard=True, varies=True),
    ".bin": Format("token_files:read_bin", b"", is_shard=True, is_mapped=True),
    ".npy": Format(
        "token_files:read_npy", b"\x93NUMPY", kind="a NumPy array", is_shard=True, is_mapped=True
    ),
    ".h5": HDF5,
    ".hdf5": HDF5,
    **dict.fromkeys(IMAGES, IMAGE),
}
"""The format of each suffix."""

FIRST_SUFFIXES = {form: suffix for suffix, form in reversed(FORMATS.items())}
"""The first suffix of each format."""

FILE_NAME = (
    r".+\.(?:array_record|(?:"
    + "|".join(suffix[1:] for suffix in FORMATS)
    + r")(?:\.(?:gz|zst|bz2))?)"
)
"""A regular expression for the names of files, which may have characters that others have not."""


class TypeChangedError(Exception):
    """A part of a file needs another type, `type`, for the whole column than the parts before."""

    def __init__(self, path: str, column: str, type: Any) -> None:
        super().__init__(path, column, type)
        self.path, self.column, self.type = path, column, type


class BadRows:
    """Count the lines of skipped damaged rows by file, and keep the beginning of the first row."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def clear(self) -> None:
        """Begin again."""
        self.count.clear()
        self.first.clear()

    def skip(self, path: str, text: str) -> str:
        """Count a row, and return pyarrow's word for skipping it."""
        # A quote that is not closed makes one row of all lines that follow.
        self.count[path] = self.count.get(path, 0) + 1 + text.strip().count("\n")
        self.first.setdefault(path, text[:80] + "..." * (len(text) > 80))
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
    optional: tuple[str, ...] = ()
    decimal_point: str | None = None  # of numbers in CSV. None: a point.
    client: str | None = None
    image: str | None = None  # a column of encoded images to decode, also without `image_size`
    read: Counter[str] | None = None  # counts images by what was changed in them
    decoded: set[str] | None = None  # collects columns of which a part had images: others have too


Reader = Callable[[Any, ReadOptions], Any]
"""A function that reads a `DataFile` as a `pyarrow.Table`; for images it reads a list of files."""


def format_of(file: DataFile) -> Format:
    """Return the format of a file; an empty row if its suffix is of none."""
    return FORMATS.get(file.suffix, Format("", b""))


def is_shard(file: DataFile) -> bool:
    """Return whether a file is a part of a data set, not a client."""
    return file.is_shard or format_of(file).is_shard or is_numbered(file.name)


def is_image(file: DataFile) -> bool:
    """Return whether a file is one image, and so one example."""
    return file.suffix in IMAGES


def find_reader(file: DataFile) -> Reader:
    """Return the function that reads a file."""
    if file.suffix not in FORMATS:
        raise ArgumentError(
            f"{file.path} has the suffix {file.suffix!r}, expected one of {', '.join(FORMATS)}, "
            "alone or before .gz, .zst or .bz2. "
            f"{SUFFIX_REMEDIES.get(file.suffix, 'Rename the file, or name others')}."
        )
    return find_function(FORMATS[file.suffix].read)


def find_stream(file: DataFile) -> Reader | None:
    """Return the function that reads a file in parts, or None if its format is read at once."""
    stream = format_of(file).stream
    return None if stream is None else find_function(stream)


def find_function(place: str) -> Callable[..., Any]:
    """Import a function of `readers/`."""
    file, _, name = place.partition(":")
    module = importlib.import_module(f"fedpax.user_files.readers.{file}")
    function: Callable[..., Any] = getattr(module, name)
    return function


_HEAD = 1 << 12  # bytes
_SAVE_AS_CSV = "Save it as CSV in UTF-8, or read it with pandas.read_excel and pass the table"
_SIGNATURES = {
    b"\x1f\x8b": ("is compressed by gzip", "Rename it to {path}.gz"),
    b"\x28\xb5\x2f\xfd": ("is compressed by zstd", "Rename it to {path}.zst"),
    b"BZh": ("is compressed by bzip2", "Rename it to {path}.bz2"),
    ZIP: ("is a zip archive", "Extract it with unzip, and name the files in it"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("is an Excel file", _SAVE_AS_CSV),
    b"%PDF": ("is a PDF file", "Export the table as CSV"),
    b"SQLite format 3": ("is an SQLite database", "Export the table as CSV"),
    **{
        form.signature: (f"is {form.kind}", f"Give it the suffix {suffix}")
        for form, suffix in FIRST_SUFFIXES.items()
        if form.kind
    },
}
_COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".bz2": b"BZh"}

SUFFIX_REMEDIES = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), _SAVE_AS_CSV),
    **dict.fromkeys(
        (".zip", ".7z", ".rar", ".tgz"), "Extract the archive, and name the files in it"
    ),
    **dict.fromkeys(
        (".txt", ".dat"),
        'Rename a table to .csv, and set delimiter=. Write texts as .jsonl, one {"text": "..."} in '
        "each line",
    ),
    **dict.fromkeys((".tif", ".tiff", ".heic", ".avif"), "Save the images as PNG or JPEG"),
    ".dta": "Read it with pandas.read_stata, and pass the table",
    ".sav": "Read it with pandas.read_spss, and pass the table",
    ".sas7bdat": "Read it with pandas.read_sas, and pass the table",
}
"""How to read files whose suffix names no format of `formats.py`."""


def describe_contents(file: DataFile) -> str | None:
    """Return an error for a file that holds nothing, or another format than its suffix says."""
    with file.open_seekable() as opened:
        head: bytes = opened.read(_HEAD)
    path, expected = file.path, f"expected {file.suffix[1:]}"
    if not head.strip() and len(head) < _HEAD:
        return (
            f"{path} is empty, expected at least one example. Leave the file out, or copy it again "
            "if it had contents."
        )
    if file.is_compressed:
        suffix = next(suffix for suffix in _COMPRESSED if path.lower().endswith(suffix))
        if head.startswith(_COMPRESSED[suffix]):
            return None
        return (
            f"{path} is not compressed, {expected} compressed as {suffix[1:]}. Rename it to "
            f"{path[: -len(suffix)]}, or copy it again."
        )
    if head.lstrip(b"\xef\xbb\xbf \r\n\t").lower().startswith((b"<!doctype html", b"<html")):
        return (
            f"{path} is an HTML page, such as a page to sign in, {expected}. Open the address in a "
            "browser, and download the file itself."
        )
    for signature, (kind, remedy) in _SIGNATURES.items():
        if head.startswith(signature) and format_of(file).signature != signature:
            if signature == ZIP and (b"[Content_Types]" in head or b"xl/" in head):
                kind, remedy = "is an Excel file", _SAVE_AS_CSV
            return f"{path} {kind}, {expected}. {remedy.format(path=path)}."
    return None


class LoadOptions(NamedTuple):
    """How files become a source; `fedpax.data.load` describes each option."""

    split: str | None = None
    client: str | None = None
    label: str | None = None
    partition: str | None = None
    columns: Sequence[str] = ()
    optional_columns: Sequence[str] = ()
    types: Mapping[str, str] | None = None
    delimiter: str | None = None
    decimal_point: str | None = None
    image_size: tuple[int, int] | None = None
    heldout_fraction: float = 0.0
    heldout_by: str = "example"
    texts: Mapping[str, str] | None = None  # columns that need a text, by how to name another one
    image: str | None = None  # as in `ReadOptions`

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options among the arguments of a function that takes them by name."""
        return cls(**{name: arguments[name] for name in cls._fields if name in arguments})


def parse_types(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse texts such as `zip=string` of a flag for `LoadOptions.types`."""
    pairs = [text.rpartition("=") for text in texts]
    for text, (_, equals, _) in zip(texts, pairs, strict=True):
        if not equals:
            raise ArgumentError(
                f"{flag} has {text!r}, expected COLUMN=TYPE. Set for example {flag}=zip=string."
            )
    check_distinct(flag, [name for name, _, _ in pairs], remedy="Leave out all but one.")
    return {name: data_type for name, _, data_type in pairs}
