"""Hashes of the bytes of encoded images, by which images are held out; in a hidden column."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, UInt64

from fedpax.sources.shuffle import hash_key

_PREFIX = "__image_hash__"
# The first bytes of JPEG, PNG, GIF and TIFF.
_HEADS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"II*\0", b"MM\0*")


def hash_bytes(content: bytes) -> int:
    """Return a hash of 64 bits."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def hash_column(name: str) -> str:
    """Return the name of the column with the hashes of a column of images."""
    return _PREFIX + name


def is_hash(name: str) -> bool:
    """Return whether a column has hashes, so that users do not see it."""
    return name.startswith(_PREFIX)


def visible(names: Iterable[str]) -> list[str]:
    """Return the names of the columns that users see."""
    return [name for name in names if not is_hash(name)]


def without_hashes(table: pa.Table) -> pa.Table:
    """Return a table without the columns of hashes; without a copy."""
    return table.select(visible(table.column_names))


def can_be_encoded(kind: pa.DataType) -> bool:
    """Return whether a type is bytes, or Hugging Face's structures of `bytes` and `path`."""
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and can_be_encoded(kind.field(place).type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def encoded_values(column: Any) -> list[bytes | None]:
    """Return the bytes of each value of a column whose type can be encoded images."""
    values: list[Any] = column.to_pylist()
    if pa.types.is_struct(column.type):
        return [value and value["bytes"] for value in values]
    return values


def is_encoded_image(content: bytes | None) -> bool:
    """Return whether bytes begin as files of images do."""
    if content is None:
        return False
    head = content[:14]
    return (
        head.startswith(_HEADS)
        or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
        or (head[:2] == b"BM" and head[6:10] == bytes(4))
        or re.match(rb"P[1-6]\s", head) is not None
    )


def has_encoded_images(column: Any) -> bool:
    """Return whether any value of a column is an image that is not decoded."""
    return can_be_encoded(column.type) and any(map(is_encoded_image, encoded_values(column)))


def hash_images(
    table: pa.Table,
) -> tuple[UInt64[np.ndarray, " examples"], Bool[np.ndarray, " examples"]]:
    """Return a hash of the images of each example, and whether it has any."""
    columns: list[tuple[Any, Any]] = []
    for name in sorted(visible(table.column_names)):
        column = table.column(name)
        if (hashes := hash_column(name)) in table.column_names:
            of_images = table.column(hashes)
            is_known = np.asarray(of_images.is_valid())
            columns.append((of_images.fill_null(0).to_numpy(), is_known))
        elif can_be_encoded(column.type):
            values = encoded_values(column)
            known = [is_encoded_image(value) for value in values]
            if any(known):
                pairs = zip(values, known, strict=True)
                columns.append(([hash_bytes(v) if v and k else 0 for v, k in pairs], known))
    keys = np.zeros(table.num_rows, np.uint64)
    seen = np.zeros(table.num_rows, np.bool_)
    for hashes_of, known in columns:
        own, is_image = np.array(hashes_of, np.uint64), np.asarray(known, np.bool_)
        # One image is its own hash, whatever columns without images stand beside it.
        joined = np.where(seen, hash_key(keys, own), own)
        keys, seen = np.where(is_image, joined, keys), seen | is_image
    return keys, seen
