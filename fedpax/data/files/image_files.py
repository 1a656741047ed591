"""read_images: image files and encoded images as arrays of uint8, decoded by Pillow."""

import io
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import UInt8
from PIL import Image

from fedpax.data.files.columns import array_to_arrow
from fedpax.data.files.finding import DataFile
from fedpax.data.files.formats import ReadOptions
from fedpax.errors import ArgumentError

IMAGE = "image"
"""The column of the image that is read from a file."""

_MODES = {"1": "L", "L": "L", "I;16": "L", "LA": "L"}  # others become RGB


def read_images(files: Sequence[DataFile], options: ReadOptions) -> pa.Table:
    """Read an example from each image file.

    Returns:
        The column `image`, uint8 `[examples, height, width, channels]`.

    Raises:
        ValueError: a file is not an image, or the images have several shapes.
    """

    def read(file: DataFile) -> bytes:
        with file.open() as opened:
            content: bytes = opened.read()
            return content

    images = decode_images(
        (lambda file=file: read(file) for file in files), [file.path for file in files], options
    )
    return pa.table({IMAGE: array_to_arrow(images)})


def decode_images(
    contents: Iterable[Callable[[], bytes]], names: Sequence[str], options: ReadOptions
) -> UInt8[np.ndarray, "examples height width channels"]:
    """Decode images on all cores.

    Args:
        contents: functions that return the encoded image.
        names: the images' names, for messages.
        options: `image_size` is the height and width to resize to, or None.

    Raises:
        ValueError: an image is damaged, or images have several shapes and no size is set.
    """

    def decode(content: Callable[[], bytes], name: str) -> UInt8[np.ndarray, "..."]:
        try:
            with Image.open(io.BytesIO(content())) as image:
                gray = image.mode in _MODES
                image = image.convert(_MODES.get(image.mode, "RGB"))
                if options.image_size is not None:
                    height, width = options.image_size
                    image = image.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(image)
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
    return np.stack(images) if images else np.zeros((0, 1, 1, 1), np.uint8)


def decode_column(column: Any, options: ReadOptions) -> Any:
    """Decode Hugging Face's feature Image, structures of `bytes` and `path`."""
    encoded = [value and value["bytes"] for value in column.to_pylist()]
    if None in encoded:
        raise ArgumentError(
            f"image {encoded.index(None)} is missing, or a path without its bytes, expected every "
            "image in the file. Embed the images when the data set is saved, or leave the column "
            "out with columns="
        )
    names = [f"image {number}" for number in range(len(encoded))]
    return array_to_arrow(decode_images((lambda e=e: e for e in encoded), names, options))
