"""Encoded images, in files, a tar and columns of bytes, as arrays of uint8, decoded by Pillow."""

import contextlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import UInt8
from PIL import Image

from fedpax.console import count_of
from fedpax.errors import ArgumentError
from fedpax.user_files.arrow_numpy import array_to_arrow
from fedpax.user_files.finding import DataFile
from fedpax.user_files.formats import ReadOptions
from fedpax.user_files.image_hashes import (
    can_be_encoded,
    encoded_values,
    has_encoded_images,
    hash_bytes,
    hash_column,
)

IMAGE = "image"
"""The column of the image that is read from a file."""

_GRAY = ("1", "L", "LA")  # other modes become RGB
_ORIENTATION = 0x0112  # of EXIF; 1 is upright
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L")  # more than 8 bits, which uint8 would clip


def read_images(files: Sequence[DataFile], options: ReadOptions) -> pa.Table:
    """Read each file as an example, `image`: uint8 `[examples, height, width, channels]`."""
    paths = [file.path for file in files]
    images = decode_images(files, paths, paths, options)
    return pa.table({IMAGE: images.pixels, hash_column(IMAGE): images.hashes})


class Images(NamedTuple):
    """Decoded images."""

    rows: list[int]
    pixels: pa.Array  # tensors
    hashes: pa.Array

    def put(self, table: pa.Table, column: str) -> pa.Table:
        """Set a column, with its hashes, in the rows that are not skipped."""
        if len(self.rows) < table.num_rows:
            table = table.take(pa.array(self.rows, pa.int64()))
        for name, values in {column: self.pixels, hash_column(column): self.hashes}.items():
            place = table.schema.get_field_index(name)
            if place < 0:
                table = table.append_column(name, values)
            else:
                table = table.set_column(place, name, values)
        return table


class _Decoded(NamedTuple):
    """A decoded image, and what was changed in it."""

    pixels: UInt8[np.ndarray, "height width channels"]
    key: int  # its hash
    changes: tuple[str, ...]


class _Failure(NamedTuple):
    """Why an image cannot be read, and how to mend it."""

    reason: str
    remedy: str = "Copy it again"


def _decode(source: bytes | DataFile | None, size: tuple[int, int] | None) -> _Decoded | _Failure:
    """Decode an image upright, gray or RGB, and resize it."""
    if isinstance(source, DataFile):
        with source.open() as opened:
            content: bytes | None = opened.read()
    else:
        content = source
    if content is None:
        return _Failure("it has no bytes", "Fill it in, embed images that are paths")
    try:
        with Image.open(io.BytesIO(content)) as encoded:
            if encoded.mode in _DEEP:
                return _Failure(
                    f"its pixels have more than 8 bits (mode {encoded.mode}), expected 0 to 255",
                    "Scale them to 8 bits, save the arrays as .npz",
                )
            gray = encoded.mode in _GRAY
            changes = ["gray" if gray else "RGB"]
            changes += ["alpha"] * encoded.has_transparency_data
            image = _turn_upright(encoded.convert("L" if gray else "RGB"), encoded, changes)
            with contextlib.suppress(Exception):  # of damaged frames that are not read
                changes += ["frames"] * (getattr(encoded, "n_frames", 1) > 1)
    except Image.UnidentifiedImageError:
        of_bytes = "its first bytes are of no known format of images"
        return _Failure(of_bytes if content else "it is empty")
    except Exception as error:  # parsers of damaged files raise errors of many types
        return _Failure(" ".join(str(error).split()).rstrip(".") or "it is damaged")
    if size is not None:
        height, width = size
        changes += ["stretched"] * (image.width * height != image.height * width)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return _Decoded(pixels[..., None] if gray else pixels, hash_bytes(content), tuple(changes))


def _turn_upright(image: Image.Image, encoded: Image.Image, changes: list[str]) -> Image.Image:
    """Turn an image by its EXIF orientation, as viewers do."""
    turn = None
    with contextlib.suppress(Exception):  # of damaged EXIF, beside whole pixels
        turn = _TURNS.get(encoded.getexif().get(_ORIENTATION, 1))
    if turn is None:
        return image
    changes.append("turned")
    return image.transpose(turn)


def decode_images(
    contents: Sequence[bytes | DataFile | None],
    names: Sequence[str],
    files: Sequence[str],
    options: ReadOptions,
) -> Images:
    """Decode images on all cores; `names` are in errors, `files` in the counts of skipped rows."""
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda content: _decode(content, options.image_size), contents))
    failed = {k: result for k, result in enumerate(results) if isinstance(result, _Failure)}
    whole = {k: result for k, result in enumerate(results) if isinstance(result, _Decoded)}
    if failed and (options.bad_rows is None or (not whole and options.image_size is None)):
        raise ArgumentError(_describe_failures(failed, names))
    for k, failure in failed.items():
        assert options.bad_rows is not None
        row = "" if names[k] == files[k] else f"{names[k]}: "
        options.bad_rows.skip(files[k], f"{row}{failure.reason}")
    if options.read is not None:
        options.read.update(change for image in whole.values() for change in image.changes)
    hashes = pa.array([image.key for image in whole.values()], pa.uint64())
    if not whole:  # of unknown channels: gray images become those of others
        none = np.zeros((0, *(options.image_size or ()), 1), np.uint8)
        return Images([], array_to_arrow(none), hashes)
    pixels = _stack([image.pixels for image in whole.values()], [names[k] for k in whole])
    return Images([*whole], pixels, hashes)


_MOST_NAMES = 5


def _describe_failures(failed: dict[int, _Failure], names: Sequence[str]) -> str:
    """Return an error for the images that cannot be read."""
    (first, failure), *others = failed.items()
    text = f"{names[first]} is not a readable image: {failure.reason}"
    if others:
        shown = ", ".join(names[k] for k, _ in others[: _MOST_NAMES - 1])
        more = len(others) - (_MOST_NAMES - 1)
        text += (
            f". Of the {len(names):,} images read together, {count_of(len(others), 'other')} "
            f"cannot be read: {shown}{f' and {more:,} more' if more > 0 else ''}"
        )
    skip = "`fedpax prepare` does with --on_bad_row=skip"
    return f"{text}. {failure.remedy}, or leave it out: {skip}"


def _stack(images: Sequence[UInt8[np.ndarray, "..."]], names: Sequence[str]) -> pa.Array:
    """Return images of one size as a tensor; gray ones become RGB if others are."""
    if len({image.shape[-1] for image in images}) > 1:
        images = [np.broadcast_to(image, (*image.shape[:2], 3)) for image in images]
    shapes: dict[tuple[int, ...], str] = {}
    for image, name in zip(images, names, strict=True):
        shapes.setdefault(image.shape, name)
    if len(shapes) > 1:
        (one, first), (two, second) = list(shapes.items())[:2]
        raise ArgumentError(
            f"{first} is {one[0]} x {one[1]} and {second} is {two[0]} x {two[1]}, expected one "
            "size. Set image_size=(height, width) to resize them"
        )
    return array_to_arrow(np.stack(images))


def describe_read(read: Counter[str]) -> list[str]:
    """Return lines on what was changed in images."""
    notes = [
        f"{count_of(read[change], 'image')} {text}"
        for change, text in _CHANGES.items()
        if read[change]
    ]
    if read["gray"] and read["RGB"]:
        total = read["gray"] + read["RGB"]
        notes.append(f"{count_of(read['gray'], 'gray image')} of {total:,}: all become RGB")
    return notes


_CHANGES = {
    "turned": "with an EXIF orientation: turned upright",
    "alpha": "with alpha: alpha is dropped",
    "frames": "with several frames: the first is read",
    "stretched": "of another ratio of height and width than image_size: stretched",
}


def decode_features(
    table: pa.Table, options: ReadOptions, file: str = "the table", first_row: int = 0
) -> pa.Table:
    """Decode the columns of images and arrays that Hugging Face's metadata names; others stay."""
    features = _features(table.schema)
    for name in options.columns or table.column_names:
        if table.column_names.count(name) != 1:  # an error tells it later
            continue
        column, feature = table.column(name), features.get(name, {"_type": ""})
        if can_be_encoded(column.type) and name not in options.types:
            decoded = set() if options.decoded is None else options.decoded
            is_image = feature["_type"] == "Image" or name == options.image or name in decoded
            if is_image or (options.image_size is not None and has_encoded_images(column)):
                decoded.add(name)
                table = _decode_column(table, name, options, file, first_row)
        elif feature["_type"] in _ARRAYS and None not in feature["shape"]:
            position = table.column_names.index(name)
            table = table.set_column(position, name, _to_tensor(column, feature["shape"]))
    return table


def _decode_column(
    table: pa.Table, name: str, options: ReadOptions, file: str, first_row: int
) -> pa.Table:
    encoded = encoded_values(table.column(name))
    if not encoded:
        raise ArgumentError("it has no examples")
    rows = [f"{name!r} of row {first_row + n} (counted from 0)" for n in range(len(encoded))]
    return decode_images(encoded, rows, [file] * len(rows), options).put(table, name)


_ARRAYS = ("Array2D", "Array3D", "Array4D", "Array5D")  # stored as lists of lists


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    metadata = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(metadata or "{}")["info"]["features"]
        return {name: f for name, f in features.items() if f["_type"] and name in schema.names}
    except (ValueError, KeyError, TypeError, AttributeError):  # a form that is not known here
        return {}


def _to_tensor(column: Any, shape: Sequence[int]) -> Any:
    """Convert lists of lists to a tensor, unless a value is missing."""
    values = column.combine_chunks()
    values = getattr(values, "storage", values)  # of the type that the package `datasets` adds
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = values.flatten()
    if values.null_count or len(values) != len(column) * np.prod(shape):
        return column
    return array_to_arrow(values.to_numpy(zero_copy_only=False).reshape(len(column), *shape))
