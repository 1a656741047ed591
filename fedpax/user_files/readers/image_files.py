"""read_images: image files and encoded images as arrays of uint8, decoded by Pillow."""

import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import UInt8
from PIL import Image

from fedpax.errors import ArgumentError
from fedpax.user_files.columns import array_to_arrow
from fedpax.user_files.finding import DataFile
from fedpax.user_files.formats import ReadOptions

IMAGE = "image"
"""The column of the image that is read from a file."""

_GRAY = ("1", "L", "LA")  # other modes become RGB
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L")  # more than 8 bits, which uint8 would clip


def read_images(files: Sequence[DataFile], options: ReadOptions) -> pa.Table:
    """Read each file as an example, `image`: uint8 `[examples, height, width, channels]`."""
    return pa.table({IMAGE: decode_images(files, [file.path for file in files], options)})


def decode_images(
    contents: Sequence[bytes | DataFile], names: Sequence[str], options: ReadOptions
) -> pa.Array:
    """Decode images on all cores."""

    def decode(content: bytes | DataFile, name: str) -> UInt8[np.ndarray, "..."]:
        stream = content.open() if isinstance(content, DataFile) else io.BytesIO(content)
        try:
            with stream, Image.open(stream) as encoded:
                if encoded.mode in _DEEP:
                    raise ArgumentError(
                        f"{name} has pixels of more than 8 bits (mode {encoded.mode}), expected 0 "
                        "to 255. Scale them to 8 bits, or save the arrays as .npz"
                    )
                gray = encoded.mode in _GRAY
                image = encoded.convert("L" if gray else "RGB")
                if options.image_size is not None:
                    height, width = options.image_size
                    image = image.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(image)
        except PermissionError:
            raise
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ArgumentError(f"{name} is not a readable image: {error}") from error
        return pixels[..., None] if gray else pixels

    with ThreadPoolExecutor() as pool:
        images = list(pool.map(decode, contents, names))
    if len({image.shape[-1] for image in images}) > 1:  # some are gray
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


def decode_column(column: Any, options: ReadOptions) -> Any:
    """Decode Hugging Face's feature Image, structures of `bytes` and `path`."""
    encoded = [value and value["bytes"] for value in column.to_pylist()]
    if not encoded:
        raise ArgumentError("it has no examples")
    if None in encoded:
        raise ArgumentError(
            f"image {encoded.index(None)} is missing, or a path without its bytes, expected every "
            "image in the file. Embed the images when the data set is saved, or leave the column "
            "out with columns="
        )
    return decode_images(encoded, [f"image {n}" for n in range(len(encoded))], options)


# decode_features: Hugging Face's features in Arrow tables, images and arrays of one shape.
def decode_features(table: pa.Table, options: ReadOptions) -> pa.Table:
    """Decode the columns that the schema's metadata calls images or arrays; others stay."""
    for name, feature in _features(table.schema).items():
        if options.columns and name not in options.columns:
            continue
        position, column = table.column_names.index(name), table.column(name)
        if feature["_type"] == "Image" and pa.types.is_struct(column.type):
            table = table.set_column(position, name, decode_column(column, options))
        elif feature["_type"] in _ARRAYS and None not in feature["shape"]:
            table = table.set_column(position, name, _to_tensor(column, feature["shape"]))
    return table


_ARRAYS = ("Array2D", "Array3D", "Array4D", "Array5D")  # stored as lists of lists


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return Hugging Face's features of columns."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(metadata or "{}")["info"]["features"]
        return {name: f for name, f in features.items() if f["_type"] and name in schema.names}
    except (ValueError, KeyError, TypeError, AttributeError):  # a form that is not known here
        return {}


def _to_tensor(column: Any, shape: Sequence[int]) -> Any:
    """Convert lists of lists to a tensor; a column in which a value is missing stays."""
    values = column.combine_chunks()
    values = getattr(values, "storage", values)  # of the type that the package `datasets` adds
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = values.flatten()
    if values.null_count or len(values) != len(column) * np.prod(shape):
        return column
    return array_to_arrow(values.to_numpy(zero_copy_only=False).reshape(len(column), *shape))
