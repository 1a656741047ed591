"""Augmentation of images: random crops and flips of a round's cohort, and standardization."""

import numpy as np
from jaxtyping import Float, Num

from fedpax.clients.cohort import Cohort
from fedpax.errors import ArgumentError


def augment_cohort(cohort: Cohort, round_number: int, *, size: int, seed: int) -> Cohort:
    """Crop each image of a cohort at random, flip it with probability 1/2, and standardize it.

    The random numbers depend on the seed, the round and the client alone, so that a run can resume
    on other devices.

    Args:
        cohort: the cohort; `batches["image"]` is float `[clients, steps, batch, height, width,
            channels]`, and `client_ids` are set.
        round_number: the round, from 0.
        size: height and width of the crops.
        seed: the random seed.

    Returns:
        The cohort with images `[clients, steps, batch, size, size, channels]`.

    Raises:
        ValueError: the images are smaller than the crops.

    Example:
        >>> batches = {"image": np.random.default_rng(0).normal(size=(2, 3, 4, 8, 8, 1))}
        >>> cohort = Cohort(batches, client_ids=np.array([7, 1]))
        >>> augment_cohort(cohort, 0, size=6, seed=0).batches["image"].shape
        (2, 3, 4, 6, 6, 1)
    """
    images = cohort.batches["image"]
    _check(images.shape, size)
    crops = np.empty((*images.shape[:-3], size, size, images.shape[-1]), images.dtype)
    for own, crop, client in zip(images, crops, np.asarray(cohort.client_ids), strict=True):
        rng = np.random.default_rng([seed, round_number, int(client) + 1])  # -1: an absent client
        top, left, is_flipped = (
            rng.integers(limit, size=own.shape[:2])
            for limit in (own.shape[2] - size + 1, own.shape[3] - size + 1, 2)
        )
        for place in np.ndindex(own.shape[:2]):
            y, x = top[place], left[place]
            window = own[place][y : y + size, x : x + size]
            crop[place] = window[:, ::-1] if is_flipped[place] else window
    return cohort._replace(batches={**cohort.batches, "image": standardize(crops)})


def central_crop(
    images: Num[np.ndarray, "*batch height width channels"], size: int
) -> Num[np.ndarray, "*batch size size channels"]:
    """Crop images to their centers.

    Args:
        images: `[..., height, width, channels]`.
        size: height and width of the crops.

    Raises:
        ValueError: the images are smaller than the crops.

    Example:
        >>> central_crop(np.arange(16).reshape(4, 4, 1), 2)[..., 0].tolist()
        [[5, 6], [9, 10]]
    """
    _check(images.shape, size)
    top, left = ((side - size) // 2 for side in images.shape[-3:-1])
    return images[..., top : top + size, left : left + size, :]


def standardize(
    images: Float[np.ndarray, "*batch height width channels"],
) -> Float[np.ndarray, "*batch height width channels"]:
    """Shift and scale each image to mean 0 and standard deviation 1.

    The standard deviation counts as at least 1 / (255 sqrt(number of values)), so that an image of
    one color becomes 0. This is TensorFlow's `per_image_standardization` of pixels from 0 to 255.

    Args:
        images: `[..., height, width, channels]`, pixels from 0 to 1.

    Example:
        >>> out = standardize(np.array([0.0, 0.5, 0.5, 1.0]).reshape(2, 2, 1))
        >>> round(float(out.std()), 4), round(float(out.mean()), 4)
        (1.0, 0.0)
    """
    axes = (-3, -2, -1)
    least = 1 / (255 * np.sqrt(np.prod(images.shape[-3:])))
    mean, deviation = images.mean(axes, keepdims=True), images.std(axes, keepdims=True)
    return ((images - mean) / np.maximum(deviation, least)).astype(images.dtype)


def _check(shape: tuple[int, ...], size: int) -> None:
    if not 1 <= size <= min(shape[-3:-1]):
        raise ArgumentError(
            f"The crops have size {size}, and the images {shape[-3]} x {shape[-2]} pixels, "
            "expected crops of at least 1 pixel that are no larger than the images. Set "
            "crop_size to a smaller number, or to None for whole images."
        )
