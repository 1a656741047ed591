"""read_tar: WebDataset, a tar file whose consecutive members of one name are an example."""

import io
import json
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Self

import numpy as np
import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.user_files.arrow_numpy import array_to_arrow
from fedpax.user_files.finding import DataFile
from fedpax.user_files.formats import IMAGES, ReadOptions
from fedpax.user_files.read_table import join_parts
from fedpax.user_files.readers.image_files import decode_images

_EXAMPLES_AT_ONCE = 1024
_MOST_BYTES = 1 << 28  # of a part's members


def read_tar(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read an example from the members of one name, which with its folder is the column `key`."""
    # An image is the column `image`, .cls is `label`, .txt is `text`, .npy is `array`, .json adds
    # its own names, and any other member is bytes in the column of its suffix.
    return join_parts(stream_tar(file, options))


def stream_tar(file: DataFile, options: ReadOptions) -> Iterator[pa.Table]:
    """Read the examples in parts; a part has the types of its own values."""
    rows: list[dict[str, Any]] = []
    size = 0
    for key, members in _examples(file):
        row: dict[str, Any] = {"key": key}
        for suffix, content in members.items():
            for name, value in _decode(key, suffix, content).items():
                if name in row and not np.array_equal(row[name], value):
                    remedy = f"Rename one, such as {key}.mask"
                    if name == "label":
                        path = shlex.quote(file.path)
                        remedy = f"Leave one out: tar --delete --wildcards -f {path} '*.cls'"
                    raise ArgumentError(
                        f"its example {key!r} has two values of {name!r}, one of them in "
                        f"{key}.{suffix}, expected one. {remedy}"
                    )
                row[name] = value
            size += len(content)
        rows.append(row)
        if len(rows) == _EXAMPLES_AT_ONCE or size >= _MOST_BYTES:
            yield _to_table(rows, file.path, options)
            rows, size = [], 0
    if rows:
        yield _to_table(rows, file.path, options)


def _examples(file: DataFile) -> Iterator[tuple[str, dict[str, bytes]]]:
    key, members = "", dict[str, bytes]()
    try:
        with (
            file.open() as opened,
            tarfile.open(fileobj=opened, mode="r|", tarinfo=_WholeArchive) as archive,
        ):
            for member in archive:
                path = PurePosixPath(member.name)
                name, dot, suffix = path.name.partition(".")
                if not member.isfile() or not name or not dot:
                    continue
                own = (path.parent / name).as_posix()
                if member.issparse():  # some bytes can stand for any number of zeros
                    raise ArgumentError(
                        f"its member {member.name} is sparse, expected whole files. Make it again "
                        "without tar --sparse"
                    )
                if own != key and members:
                    yield key, members
                    members = {}
                key = own
                content = archive.extractfile(member)
                assert content is not None
                members[suffix.lower()] = content.read()
    except (tarfile.TarError, EOFError) as error:
        damaged = f"it is cut off or damaged ({error}). Copy it again"
        raise ArgumentError(str(error) if "Copy it" in str(error) else damaged) from error
    if members:
        yield key, members


class _WholeArchive(tarfile.TarInfo):
    """A member of a tar: `tarfile` takes a damaged header for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header; zeros are the mark of the end."""
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            raise tarfile.ReadError(
                "it is cut off or damaged, expected 512 zeros at its end. Copy it again; if it is "
                "whole, append them: head -c 1024 /dev/zero >> FILE"
            ) from error


def _decode(key: str, suffix: str, content: bytes) -> dict[str, Any]:
    """Return the columns of a member; images stay encoded."""
    if f".{suffix}" in IMAGES:
        return {"image": content}
    try:
        match suffix:
            case "cls":
                return {"label": int(content)}
            case "txt" | "text":
                return {"text": content.decode()}
            case "npy":
                return {"array": np.load(io.BytesIO(content), allow_pickle=False)}
            case "json":
                fields = json.loads(content)
                return dict(fields) if isinstance(fields, dict) else {"json": fields}
    except ValueError as error:
        raise ArgumentError(f"its member {key}.{suffix} is damaged: {error}") from error
    return {suffix: content}


def _to_table(rows: list[dict[str, Any]], path: str, options: ReadOptions) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, Any] = {}
    images = None
    for name in names:
        values = [row.get(name) for row in rows]
        if name == "image" and any(isinstance(value, bytes) for value in values):
            keys = [repr(row["key"]) for row in rows]
            images = decode_images(values, keys, [path] * len(rows), options)
            values = [None] * len(rows)
        if all(isinstance(value, np.ndarray) for value in values):
            columns[name] = _arrays(values)
        else:
            columns[name] = pa.array(values)
    return pa.table(columns) if images is None else images.put(pa.table(columns), "image")


def _arrays(values: list[Any]) -> Any:
    if len({(value.shape, value.dtype) for value in values}) == 1 and values[0].ndim:
        return array_to_arrow(np.stack(values))
    return pa.array([value.tolist() for value in values])
