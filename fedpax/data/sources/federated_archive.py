"""The archives of TensorFlow Federated's simulation data, read without TensorFlow.

An archive is an SQLite file compressed with lzma. Its table `examples` has one row per example,
with the columns `split_name`, `client_id` and `serialized_example_proto`, a `tf.train.Example`. An
index over the first two columns makes reading client by client cheap. Archives do not fit in memory
(the largest has 169 million examples), so examples are read one at a time.

Reference:
    TensorFlow Federated, tensorflow_federated/python/simulation/datasets/sql_client_data.py for
    the schema, download.py for the compression.
"""

import contextlib
import hashlib
import lzma
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedpax.errors import FedpaxError

FOLDER = "https://storage.googleapis.com/tff-datasets-public"
"""The folder of the archives."""

_COLUMNS = {"split_name", "client_id", "serialized_example_proto"}
_BLOCK_BYTES = 1 << 20  # decompressed at once


class ArchiveError(FedpaxError, OSError):
    """A damaged or unexpected archive; the message completes a sentence about the file."""


class Archive(NamedTuple):
    """Address, size and checksum of an archive.

    Attributes:
        url: where to download it.
        size: in bytes; None if no size is published.
        sha256: in hexadecimal digits; None if no checksum is published.

    Example:
        >>> Archive("https://host/folder/shakespeare.sqlite.lzma").filename
        'shakespeare.sqlite.lzma'
    """

    url: str
    size: int | None = None
    sha256: str | None = None

    @property
    def filename(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


class Feature(NamedTuple):
    """The expected type of an example's feature.

    Attributes:
        kind: the name of the list in `tf.train.Feature`.
        size: the number of values.
    """

    kind: Literal["bytes_list", "float_list", "int64_list"]
    size: int = 1


def check(path: Path, archive: Archive) -> None:
    """Check a file's size and SHA-256 against those published.

    Args:
        path: the file.
        archive: the expected archive; a size or checksum of None is not checked.

    Raises:
        ArchiveError: the size or the SHA-256 differs.
    """
    size = path.stat().st_size
    if archive.size not in (None, size):
        raise ArchiveError(f"has {size} bytes, not {archive.size}")
    if archive.sha256 is not None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != archive.sha256:
            raise ArchiveError(f"has SHA-256 {digest[:16]}..., not {archive.sha256[:16]}...")


def decompress(path: Path, database: Path) -> None:
    """Decompress an archive's database, one block at a time.

    Args:
        path: the archive, in either of lzma's formats.
        database: the file to write.

    Raises:
        ArchiveError: the archive is damaged or truncated.
        OSError: the disk is full.
    """
    with lzma.open(path) as source, database.open("wb") as target:
        try:
            shutil.copyfileobj(source, target, _BLOCK_BYTES)
        except (lzma.LZMAError, EOFError) as error:
            raise ArchiveError(f"is damaged or incomplete ({error})") from None


@contextlib.contextmanager
def open_database(database: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for reading, and check the columns of its table `examples`.

    Args:
        database: the file.

    Yields:
        The connection.

    Raises:
        ArchiveError: the file is not an SQLite database, or has no such table.
    """
    with contextlib.closing(
        sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
    ) as connection:
        with _sqlite_errors():
            found = {row[1] for row in connection.execute("PRAGMA table_info(examples)")}
        if not found >= _COLUMNS:
            raise ArchiveError(
                f"has no table 'examples' with the columns {', '.join(sorted(_COLUMNS))}, but "
                + (f"one with {', '.join(sorted(found))}" if found else "no table of that name")
            )
        yield connection


def count_examples(connection: sqlite3.Connection, split: str) -> int:
    """Return the number of examples in a split.

    Args:
        connection: to the database.
        split: the archive's own name of it, such as `"digits_only_train"`.

    Returns:
        The number, at least 1.

    Raises:
        ArchiveError: there is no such split; the message lists the existing ones.
    """
    with _sqlite_errors():
        query = "SELECT COUNT(*) FROM examples WHERE split_name = ?"
        ((count,),) = connection.execute(query, [split])
        if not count:
            found = connection.execute("SELECT DISTINCT split_name FROM examples ORDER BY 1")
            names = ", ".join(repr(name) for (name,) in found) or "no examples at all"
            raise ArchiveError(f"has no split {split!r}, but {names}")
    return count


def read_examples(
    connection: sqlite3.Connection, split: str, features: Mapping[str, Feature]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a split client by client, one example at a time.

    Args:
        connection: to the database.
        split: the archive's own name of it.
        features: the features to read from each example, by name.

    Yields:
        A client's name and one example, a dict by feature: bytes for a `bytes_list`, which must
        hold one value; float32 or int64 [size] for the other kinds. Clients are sorted by the code
        points of their names; a client's examples keep the archive's order.

    Raises:
        ArchiveError: the database is damaged, or an example does not match `features`.
    """
    from tensorflow_datasets.proto import tf_example_pb2

    with _sqlite_errors():
        rows = connection.execute(
            "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? "
            "ORDER BY client_id, rowid",
            [split],
        )
        for index, (client, serialized) in enumerate(rows):
            try:
                found = tf_example_pb2.Example.FromString(serialized).features.feature
                values = {name: _value(found, name, feature) for name, feature in features.items()}
            except Exception as error:  # including protobuf's own types
                raise ArchiveError(
                    f"has a bad example, index {index} of split {split!r}, client {client!r}: "
                    f"{error}"
                ) from None
            yield client, values


def _value(found: Mapping[str, Any], name: str, feature: Feature) -> Any:
    """Return the values of one feature of an example, after checking their kind and number."""
    if name not in found:
        raise ArchiveError(
            f"no feature {name!r}, but {', '.join(map(repr, sorted(found))) or 'none'}"
        )
    kind = found[name].WhichOneof("kind")
    if kind != feature.kind:
        raise ArchiveError(f"its feature {name!r} is a {kind}, not a {feature.kind}")
    values = getattr(found[name], kind).value
    if len(values) != feature.size:
        raise ArchiveError(f"its feature {name!r} has {len(values)} values, not {feature.size}")
    if kind == "bytes_list":
        return values[0]
    return np.array(values, np.float32 if kind == "float_list" else np.int64)


@contextlib.contextmanager
def _sqlite_errors() -> Iterator[None]:
    """Turn SQLite's errors into an `ArchiveError`."""
    try:
        yield
    except sqlite3.Error as error:
        raise ArchiveError(f"does not hold a valid SQLite database ({error})") from None
