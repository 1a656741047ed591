"""The archives of TensorFlow Federated's simulation data, read without TensorFlow.

An archive is an SQLite file compressed with lzma, which does not fit in memory. Its table
`examples` has the columns `split_name`, `client_id` and `serialized_example_proto`.
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

ARCHIVES_URL = "https://storage.googleapis.com/tff-datasets-public"
"""The folder of the archives, on the network."""

_COLUMNS = {"split_name", "client_id", "serialized_example_proto"}
_BLOCK_BYTES = 1 << 20  # decompressed at once


class ArchiveError(FedpaxError, OSError):
    """A damaged or unexpected archive; the message completes a sentence about the file."""


class Archive(NamedTuple):
    """Address, size and checksum of an archive."""

    url: str
    size: int | None = None  # None if no size is published
    sha256: str | None = None  # None if no checksum is published

    @property
    def filename(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


class Feature(NamedTuple):
    """The expected type of an example's feature."""

    # The name of the list in `tf.train.Feature`.
    kind: Literal["bytes_list", "float_list", "int64_list"]
    size: int = 1


def check(path: Path, archive: Archive) -> None:
    """Check a file's size and SHA-256 against the published ones; None is not checked."""
    size = path.stat().st_size
    if archive.size not in (None, size):
        raise ArchiveError(f"has {size} bytes, not {archive.size}")
    if archive.sha256 is not None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != archive.sha256:
            raise ArchiveError(f"has SHA-256 {digest[:16]}..., not {archive.sha256[:16]}...")


def decompress(path: Path, database: Path) -> None:
    """Decompress an archive's database, in either of lzma's formats, one block at a time."""
    with lzma.open(path) as source, database.open("wb") as target:
        try:
            shutil.copyfileobj(source, target, _BLOCK_BYTES)
        except (lzma.LZMAError, EOFError) as error:
            raise ArchiveError(f"is damaged or incomplete ({error})") from None


@contextlib.contextmanager
def open_database(database: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for reading, and check the columns of its table `examples`."""
    with contextlib.closing(
        sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
    ) as connection:
        with _sqlite_errors():
            columns = {row[1] for row in connection.execute("PRAGMA table_info(examples)")}
        if not columns >= _COLUMNS:
            raise ArchiveError(
                f"has no table 'examples' with the columns {', '.join(sorted(_COLUMNS))}, but "
                + (f"one with {', '.join(sorted(columns))}" if columns else "no table of that name")
            )
        yield connection


def count_examples(connection: sqlite3.Connection, split: str) -> int:
    """Return the number of examples, at least 1, in a split; raise if there is no such split."""
    with _sqlite_errors():
        query = "SELECT COUNT(*) FROM examples WHERE split_name = ?"
        ((count,),) = connection.execute(query, [split])
        if not count:
            rows = connection.execute("SELECT DISTINCT split_name FROM examples ORDER BY 1")
            names = ", ".join(repr(name) for (name,) in rows) or "no examples at all"
            raise ArchiveError(f"has no split {split!r}, but {names}")
    return count


def read_examples(
    connection: sqlite3.Connection, split: str, features: Mapping[str, Feature]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a client's name and an example of a split, client by client."""
    # Clients are sorted by the code points of their names; a client's examples keep their order.
    from tensorflow_datasets.proto import tf_example_pb2

    with _sqlite_errors():
        rows = connection.execute(
            "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? "
            "ORDER BY client_id, rowid",
            [split],
        )
        for index, (client, serialized) in enumerate(rows):
            try:
                stored = tf_example_pb2.Example.FromString(serialized).features.feature
                values = {name: _value(stored, name, feature) for name, feature in features.items()}
            except Exception as error:  # including protobuf's own types
                raise ArchiveError(
                    f"has a bad example, index {index} of split {split!r}, client {client!r}: "
                    f"{error}"
                ) from None
            yield client, values


def _value(stored: Mapping[str, Any], name: str, feature: Feature) -> Any:
    """Return the values of one feature of an example, after checking their kind and number."""
    if name not in stored:
        raise ArchiveError(
            f"no feature {name!r}, but {', '.join(map(repr, sorted(stored))) or 'none'}"
        )
    list_name = stored[name].WhichOneof("kind")
    if list_name != feature.kind:
        raise ArchiveError(f"its feature {name!r} is a {list_name}, not a {feature.kind}")
    values = getattr(stored[name], list_name).value
    if len(values) != feature.size:
        raise ArchiveError(f"its feature {name!r} has {len(values)} values, not {feature.size}")
    if list_name == "bytes_list":
        return values[0]
    return np.array(values, np.float32 if list_name == "float_list" else np.int64)


@contextlib.contextmanager
def _sqlite_errors() -> Iterator[None]:
    """Turn SQLite's errors into an `ArchiveError`."""
    try:
        yield
    except sqlite3.Error as error:
        raise ArchiveError(f"does not hold a valid SQLite database ({error})") from None
