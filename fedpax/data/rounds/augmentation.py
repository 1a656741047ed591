"""What a round draws for each example: crops and flips of images, and seeds for dropout."""

import jax
import numpy as np
from jaxtyping import Float, Num

from fedpax.clients.cohort import Cohort
from fedpax.errors import ArgumentError


def augment_cohort(cohort: Cohort, round_number: int, *, size: int, seed: int) -> Cohort:
    """Crop each image of a cohort at random, flip it with probability 1/2, and standardize it."""
    # The random numbers depend on the seed, the round and the client alone, so that a run can
    # resume on other devices. Images are float `[clients, steps, batch, height, width, channels]`.
    images = cohort.batches["image"]
    _check(images.shape, size)
    crops = np.empty((*images.shape[:-3], size, size, images.shape[-1]), images.dtype)
    for client_images, crop, client in zip(
        images, crops, np.asarray(cohort.client_ids), strict=True
    ):
        rng = np.random.default_rng([seed, round_number, int(client) + 1])  # -1: an absent client
        top, left, is_flipped = (
            rng.integers(limit, size=client_images.shape[:2])
            for limit in (client_images.shape[2] - size + 1, client_images.shape[3] - size + 1, 2)
        )
        for place in np.ndindex(client_images.shape[:2]):
            y, x = top[place], left[place]
            window = client_images[place][y : y + size, x : x + size]
            crop[place] = window[:, ::-1] if is_flipped[place] else window
    return cohort._replace(batches={**cohort.batches, "image": standardize(crops)})


def central_crop(
    images: Num[np.ndarray, "*batch height width channels"], size: int
) -> Num[np.ndarray, "*batch size size channels"]:
    """Crop images to their centers."""
    _check(images.shape, size)
    top, left = ((side - size) // 2 for side in images.shape[-3:-1])
    return images[..., top : top + size, left : left + size, :]


def standardize(
    images: Float[np.ndarray, "*batch height width channels"],
) -> Float[np.ndarray, "*batch height width channels"]:
    """Shift and scale each image, pixels from 0 to 1, to mean 0 and standard deviation 1."""
    # The standard deviation counts as at least 1 / (255 sqrt(number of values)), so that an image
    # of one color becomes 0, as in TensorFlow's `per_image_standardization`.
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


DROPOUT_SEED = "dropout_seed"
"""The field of a batch with the seeds of its examples."""


def add_dropout_seeds(cohort: Cohort, round_number: int, *, seed: int) -> Cohort:
    """Add a field `dropout_seed` to the batches: a random number for each example and step.

    The numbers, uint32 `[clients, steps, batch]`, depend on the seed, the round and the client
    alone. `batches` of the cohort is a dict, and `client_ids` are set.

    Example:
        >>> cohort = Cohort({"label": np.zeros((2, 3, 4), int)}, client_ids=np.array([7, 1]))
        >>> seeds = add_dropout_seeds(cohort, 0, seed=0).batches["dropout_seed"]
        >>> seeds.shape, seeds.dtype.name
        ((2, 3, 4), 'uint32')
    """
    shape = jax.tree.leaves(cohort.batches)[0].shape[1:3]
    seeds = [
        # -1: an absent client. The constant 1 keeps this stream apart from the augmentation's.
        np.random.default_rng([seed, round_number, int(client) + 1, 1]).integers(
            2**32, size=shape, dtype=np.uint32
        )
        for client in np.asarray(cohort.client_ids)
    ]
    return cohort._replace(batches={**cohort.batches, DROPOUT_SEED: np.stack(seeds)})
