"""The archives of TensorFlow Federated's simulation data, read without TensorFlow.

An archive is an SQLite file compressed by lzma. Its table ``examples`` has a row an example, with
the columns ``split_name``, ``client_id`` and ``serialized_example_proto``, a ``tf.train.Example``;
an index over the first two makes reading client by client cheap. The sizes are in rows and
clients, not in what fits in memory: the largest archive has 169 million examples.

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

_COLUMNS = {"split_name", "client_id", "serialized_example_proto"}
_BLOCK = 1 << 20  # bytes to decompress at once


class ArchiveError(OSError):
    """An archive that is not what it should be; says what, without the file's name."""


class Archive(NamedTuple):
    """Where an archive comes from, and how to tell it.

    Attributes:
        url: where to download it.
        size: in bytes, or None where nobody has published it.
        sha256: in hexadecimal digits, or None.

    Example:
        >>> Archive("https://host/folder/shakespeare.sqlite.lzma").file
        'shakespeare.sqlite.lzma'
    """

    url: str
    size: int | None = None
    sha256: str | None = None

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.url.rpartition("/")[2]


class Feature(NamedTuple):
    """What a feature of an example must be.

    Attributes:
        kind: as ``tf.train.Feature`` calls it.
        size: how many values it has.
    """

    kind: Literal["bytes_list", "float_list", "int64_list"]
    size: int = 1


def check(path: Path, archive: Archive) -> None:
    """Refuses a file that is another than the archive, as far as one can know.

    Args:
        path: the file.
        archive: what it must be.

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
    """Writes an archive's database, a block at a time.

    Args:
        path: the archive, in either of lzma's formats.
        database: the file to write.

    Raises:
        ArchiveError: the archive is damaged, or ends too early.
        OSError: there is no room for the database.
    """
    with lzma.open(path) as source, database.open("wb") as target:
        try:
            shutil.copyfileobj(source, target, _BLOCK)
        except (lzma.LZMAError, EOFError) as error:
            raise ArchiveError(f"is damaged or incomplete ({error})") from None


@contextlib.contextmanager
def open_database(database: Path) -> Iterator[sqlite3.Connection]:
    """Opens a database for reading, after a look at its table ``examples``.

    Args:
        database: the file.

    Yields:
        The connection.

    Raises:
        ArchiveError: the file is no SQLite database, or has no such table.
    """
    with contextlib.closing(
        sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
    ) as connection:
        with _sqlite_errors():
            found = {row[1] for row in connection.execute("PRAGMA table_info(examples)")}
        if not found >= _COLUMNS:
            raise ArchiveError(
                f"has no table 'examples' with the columns {', '.join(sorted(_COLUMNS))}, but "
                + (f"one with {', '.join(sorted(found))}" if found else "none of that name")
            )
        yield connection


def count_examples(connection: sqlite3.Connection, split: str) -> int:
    """Returns how many examples a split has.

    Args:
        connection: to the database.
        split: as the archive calls it, such as ``"digits_only_train"``.

    Returns:
        The number, at least 1.

    Raises:
        ArchiveError: there is no such split; says which there are.
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
    """Reads a split client by client, an example at a time.

    Args:
        connection: to the database.
        split: as the archive calls it.
        features: the features to read of each example, by name.

    Yields:
        A client's name, and by feature an example's values: bytes for a ``bytes_list``, which must
        hold one; float32 or int64 [size] for the others. Clients come in the order of their
        names' code points, a client's examples in the order in which the archive has them.

    Raises:
        ArchiveError: the database is damaged, or an example is not as ``features`` says.
    """
    from tensorflow_datasets.proto import tf_example_pb2

    with _sqlite_errors():
        rows = connection.execute(
            "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? "
            "ORDER BY client_id, rowid",
            [split],
        )
        for number, (client, serialized) in enumerate(rows):
            try:
                found = tf_example_pb2.Example.FromString(serialized).features.feature
                values = {name: _value(found, name, feature) for name, feature in features.items()}
            except Exception as error:  # protobuf has its own
                raise ArchiveError(
                    f"has a bad example, number {number} of split {split!r}, client {client!r}: "
                    f"{error}"
                ) from None
            yield client, values


def _value(found: Mapping[str, Any], name: str, feature: Feature) -> Any:
    """Takes a feature out of an example."""
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
    """Says of SQLite's errors that the archive is damaged."""
    try:
        yield
    except sqlite3.Error as error:
        raise ArchiveError(f"holds no sound SQLite database ({error})") from None
