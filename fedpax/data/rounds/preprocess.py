"""preprocess: from a source's fields to the numeric fields of a batch, checked."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Num
from numpy.typing import NDArray

from fedpax.data.rounds.labeled_examples import checked_labels, checked_pixels, scale_pixels
from fedpax.data.rounds.stream import qualified_name
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import checked_tree, host_array

Arrays = Mapping[str, NDArray[Any]]
Preprocess = Callable[[Arrays], dict[str, NDArray[Any]]]
"""A function from a source's fields to a batch's fields, arrays `[examples, ...]`."""


def preprocess_images(fields: Arrays) -> dict[str, NDArray[Any]]:
    """Convert images to float32, integers scaled from 255 to 1, and labels to int32."""
    packed = pack_images(fields)
    return {**packed, "image": scale_pixels(packed["image"])}


def pack_images(fields: Arrays) -> dict[str, NDArray[Any]]:
    """Do the part of `preprocess_images` that is not left to the devices.

    Images of integers stay uint8, a quarter of the bytes; `scale_on_devices` scales them.
    """
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
