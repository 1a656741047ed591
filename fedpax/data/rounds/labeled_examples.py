"""Labelled images as arrays: reading a whole source, scaling pixels, batches for evaluation."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Num, UInt8
from numpy.typing import NDArray

from fedpax.data.rounds.documents import read
from fedpax.data.rounds.stream_parts import check_sizes, qualified_name, source_name
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import checked_cast, checked_tree, host_array
from fedpax.sources.reused_memory import ReusedMemory
from fedpax.sources.source import Columns, Examples, as_examples, get_field

LabeledArrays = dict[str, NDArray[Any]]
"""`image`: float32 `[..., height, width, channels]`; `label`: int32 `[...]`."""

_REMEDY = (
    "Convert it when the data set is prepared, or give cohort_rounds(preprocess=...) a function of "
    "your own (dict leaves all fields as they are)."
)


def read_examples(
    source: Examples, *, image_field: str = "image", label_field: str = "label"
) -> LabeledArrays:
    """Read all examples of a source of labeled images into memory.

    Args:
        source: a source from `load`, a list of dicts, a dict of columns, or a data frame.
        image_field: the field with the image.
        label_field: the field with the label.

    Returns:
        `image`, float32 `[examples, ...]`, integers of 0 to 255 scaled to 0 to 1, floats unchanged;
        `label`, int32 `[examples]`.

    Raises:
        KeyError: the examples have no such field.
        TypeError: `source` is something else, or an image or label is not numbers.
        ValueError: the source has no examples, the images' shapes differ, an integer of an image is
            outside 0 to 255, or a label is not an integer within int32.

    Example:
        >>> images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), np.uint8)
        >>> arrays = read_examples([{"image": x, "label": k} for k, x in enumerate(images)])
        >>> arrays["image"].shape, arrays["image"].dtype, arrays["label"].tolist()
        ((3, 8, 8, 1), dtype('float32'), [0, 1, 2])
    """
    images, labels = read_raw(source, image_field, label_field)
    return {"image": scale_pixels(images), "label": labels}


def example_batches(examples: LabeledArrays, batch_size: int) -> list[LabeledArrays]:
    """Split examples into batches to evaluate on, with padding in the last one.

    Args:
        examples: arrays `[examples, ...]`, as `read_examples` returns them.
        batch_size: examples per batch.

    Returns:
        For each batch the fields `[batch_size, ...]` and `mask`, float32 `[batch_size]`, 0 for
        padding.

    Raises:
        TypeError: `examples` is not columns.
        ValueError: `batch_size` is below 1, or columns have different lengths or are empty.

    Example:
        >>> batches = example_batches({"label": np.arange(5)}, 3)
        >>> [b["label"].tolist() for b in batches], batches[1]["mask"].tolist()
        ([[0, 1, 2], [3, 4, 0]], [1.0, 1.0, 0.0])
    """
    check_sizes(1, batch_size=batch_size)
    columns = as_examples(examples, "examples")
    if not isinstance(columns, Columns):
        raise ArgumentTypeError(
            f"examples is a {type(examples).__name__}, expected a dict of arrays [examples, ...]. "
            "Make it with read_examples(source)."
        )
    examples = {name: np.asarray(values) for name, values in columns.columns.items()}
    return read_batches(
        lambda rows: {name: values[rows] for name, values in examples.items()},
        np.arange(len(columns)),
        batch_size,
    )


def read_batches(
    read: Callable[[Int64[np.ndarray, " n"]], LabeledArrays],
    rows: Int64[np.ndarray, " examples"],
    batch_size: int,
) -> list[LabeledArrays]:
    """Read examples into one array for each field, of which batches are views."""
    places = np.arange(-(-len(rows) // batch_size) * batch_size).reshape(-1, batch_size)
    arrays = read(rows[places.ravel() % len(rows)])
    batches = {name: x.reshape(*places.shape, *x.shape[1:]) for name, x in arrays.items()}
    batches["mask"] = (places < len(rows)).astype(np.float32)
    return [{name: x[k] for name, x in batches.items()} for k in range(len(places))]


def scale_pixels(
    images: Num[np.ndarray, "*shape"], memory: ReusedMemory | None = None
) -> Float32[np.ndarray, "*shape"]:
    """Convert images to float32: integers, 0 to 255, are divided by 255; floats are unchanged."""
    images = checked_pixels(images)
    if images.dtype != np.uint8:
        return images
    scaled = (memory or ReusedMemory()).empty(images.shape, np.float32)
    pixels, out = images.ravel(), scaled.ravel()
    for begin in range(0, len(out), 2**16):  # in the cache
        block = out[begin : begin + 2**16]
        block[:] = pixels[begin : begin + 2**16]
        block /= np.float32(255)
    return scaled


def checked_pixels(
    images: Num[np.ndarray, "*shape"], field: str = "image"
) -> Num[np.ndarray, "*shape"]:
    """Return images as uint8 where they are integers, and as float32 otherwise."""
    dtype = np.uint8 if images.dtype.kind in "iu" else np.float32
    remedy = f"Scale it to 0 to 1, as floats. {_REMEDY}" if dtype == np.uint8 else _REMEDY
    return checked_cast(images, dtype, f"The field {field!r}", remedy)


def checked_labels(
    labels: Num[np.ndarray, "*shape"], field: str = "label"
) -> Int32[np.ndarray, "*shape"]:
    """Return labels as int32."""
    return checked_cast(labels, np.int32, f"The field {field!r}", _REMEDY)


def read_raw(
    source: Examples, image_field: str, label_field: str
) -> tuple[Num[np.ndarray, "examples height width channels"], Int32[np.ndarray, " examples"]]:
    """Read the images, uint8 or float32, and the labels of all examples of a source."""
    source = as_examples(source)
    if not len(source):
        raise ArgumentError("The source has no examples: load another split.")
    images, labels = [], []
    for begin in range(0, len(source), 1024):  # in one call each, which takes less time
        for example in read(source, range(begin, min(begin + 1024, len(source)))):
            images.append(host_array(get_field(example, image_field), f"The field {image_field!r}"))
            labels.append(host_array(get_field(example, label_field), f"The field {label_field!r}"))
    if len(shapes := {x.shape for x in images}) > 1:
        raise ArgumentError(
            f"The images of {source_name(source)} have {len(shapes)} shapes, such as "
            f"{' and '.join(map(str, sorted(shapes)[:2]))}, expected one: resize them when the "
            "data set is prepared."
        )
    pixels = checked_pixels(np.stack(images), image_field)
    return pixels, checked_labels(np.stack(labels), label_field)


Arrays = Mapping[str, NDArray[Any]]
Preprocess = Callable[[Arrays], dict[str, NDArray[Any]]]
"""A function from a source's fields to a batch's fields, arrays `[examples, ...]`."""


def preprocess_images(fields: Arrays) -> dict[str, NDArray[Any]]:
    """Convert images to float32, integers scaled from 255 to 1, and labels to int32."""
    packed = pack_images(fields)
    return {**packed, "image": scale_pixels(packed["image"])}


def pack_images(fields: Arrays) -> dict[str, NDArray[Any]]:
    """Do the part of `preprocess_images` that `scale_on_devices` does not."""
    if not {"image", "label"} <= fields.keys():
        raise KeyError(
            f"The examples have the fields {', '.join(map(repr, fields))}, expected 'image' and "
            "'label', which preprocess takes by default. Pass preprocess=dict to leave the fields "
            "as they are, or a function from these fields to the fields of a batch."
        )
    image, label = fields["image"], fields["label"]
    if image.dtype == object:
        raise ArgumentError(
            f"The images have several shapes, such as {image[0].shape}, expected one: resize them "
            "when the data set is prepared, or give a `preprocess` that does."
        )
    return {"image": checked_pixels(image), "label": checked_labels(label)}


def apply_preprocess(
    preprocess: Preprocess, fields: dict[str, NDArray[Any]], count: int
) -> dict[str, NDArray[Any]]:
    """Call `preprocess`, and check that it returns arrays of numbers `[examples, ...]`."""
    if not callable(preprocess):
        raise ArgumentTypeError(
            f"preprocess is {preprocess!r:.80}, expected a function from a source's fields to the "
            "fields of a batch. Pass preprocess=dict to leave the fields as they are."
        )
    where = f"after preprocess ({qualified_name(preprocess)})"
    result = {
        name: host_array(values, f"The field {name!r} {where}")
        for name, values in preprocess(fields).items()
    }
    for name, values in result.items():
        if values.dtype.kind not in "biufcV":  # V is bfloat16 and the like
            raise ArgumentTypeError(
                f"The field {name!r} has dtype {values.dtype} {where}, expected numbers of one "
                "shape for all examples. Leave it out, or convert it: encode text as tokens, pad "
                "examples of different shapes and return a field 'mask'."
            )
        if values.shape[:1] != (count,):
            raise ArgumentError(
                f"The field {name!r} has shape {list(values.shape)} {where}, expected [{count}, "
                "...]: one entry for each of the examples that it was given."
            )
        result[name] = checked_tree(
            values, f"The field {name!r} {where}", "Let preprocess return other numbers."
        )
    return result


def combine_masks(
    is_example: Bool[np.ndarray, " examples"],
    mask: Num[np.ndarray, "examples ..."] | None,
) -> Num[np.ndarray, "examples ..."]:
    """Set the mask from `preprocess`, if there is one, to 0 where a batch has no example."""
    if mask is None:
        return is_example
    trailing = (1,) * (mask.ndim - is_example.ndim)
    return mask * is_example.reshape(*is_example.shape, *trailing).astype(mask.dtype)


# Scaling of pixels on the devices, with the bits of the scaling on the host.
# 1 / 255 as the sum of two numbers. The product of a pixel and the first one, of 16 bits, is exact.
_HIGH = np.float32(np.floor(np.ldexp(1 / 255, 23)) / 2**23)
_LOW = np.float32(1 / 255 - float(_HIGH))


def scale_on_devices(images: UInt8[jax.Array, "*shape"]) -> Float32[jax.Array, "*shape"]:
    """Divide pixels by 255 where they are, bit by bit as `scale_pixels` does.

    A division would not do: compilers multiply by the rounded 1 / 255, or round otherwise.
    """
    scaled: jax.Array = _scale(images.sharding)(images)
    return scaled


@functools.lru_cache(maxsize=8)
def _scale(sharding: jax.sharding.Sharding) -> Any:
    def scale(images: jax.Array) -> jax.Array:
        pixels = images.astype(jnp.float32)
        return pixels * _HIGH + pixels * _LOW

    return jax.jit(scale, out_shardings=sharding)
