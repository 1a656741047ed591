"""Crops, flips and standardization of images."""

import numpy as np
import pytest

from fedpax import Cohort
from fedpax.data.rounds.augmentation import augment_cohort, central_crop, standardize

CLIENTS, SIDE, SIZE = 3, 7, 4


def random_cohort() -> Cohort:
    images = np.random.default_rng(0).uniform(size=(CLIENTS, 2, 5, SIDE, SIDE, 3))
    labels = np.arange(CLIENTS * 10).reshape(CLIENTS, 2, 5)
    batches = {"image": images.astype(np.float32), "label": labels}
    return Cohort(batches, client_ids=np.array([4, 0, 9]))


def places(image: np.ndarray, crop: np.ndarray) -> list[tuple[int, int, bool]]:
    """Return the windows (top, left, is flipped) that give a standardized crop."""
    return [
        (y, x, flipped)
        for y in range(SIDE - SIZE + 1)
        for x in range(SIDE - SIZE + 1)
        for flipped in (False, True)
        if np.allclose(
            standardize(image[y : y + SIZE, x : x + SIZE][:, :: -1 if flipped else 1]),
            crop,
            atol=1e-5,
        )
    ]


def test_each_crop_is_one_window_of_its_image_and_all_windows_occur() -> None:
    cohort, result = random_cohort(), []
    for round_number in range(12):
        after = augment_cohort(cohort, round_number, size=SIZE, seed=3)
        crops = after.batches["image"]
        assert crops.dtype == np.float32
        np.testing.assert_array_equal(after.batches["label"], cohort.batches["label"])
        for place in np.ndindex(CLIENTS, 2, 5):
            (window,) = places(cohort.batches["image"][place], crops[place])
            result.append(window)
    tops, lefts, flips = zip(*result, strict=True)
    assert set(tops) == set(lefts) == set(range(SIDE - SIZE + 1))
    assert 0.4 < np.mean(flips) < 0.6
    assert len(set(result)) == 32  # 4 x 4 places, flipped or not


def test_the_crops_depend_on_seed_round_and_client_alone() -> None:
    cohort = random_cohort()
    crops = augment_cohort(cohort, 1, size=SIZE, seed=3).batches["image"]
    order = np.array([2, 0])
    images = cohort.batches["image"][order]
    fewer = Cohort({"image": images}, client_ids=cohort.client_ids[order])
    again = augment_cohort(fewer, 1, size=SIZE, seed=3).batches["image"]
    np.testing.assert_array_equal(again, crops[order])
    for other in ({"round_number": 2, "seed": 3}, {"round_number": 1, "seed": 4}):
        different = augment_cohort(cohort, size=SIZE, **other).batches["image"]
        assert not np.allclose(different, crops)


def test_standardized_images_have_mean_0_and_deviation_1() -> None:
    images = random_cohort().batches["image"]
    out = standardize(images)
    np.testing.assert_allclose(out.mean((-3, -2, -1)), 0, atol=1e-5)
    np.testing.assert_allclose(out.std((-3, -2, -1)), 1, rtol=1e-5)
    np.testing.assert_array_equal(standardize(np.full((2, 3, 3, 1), 0.7)), 0)


def test_crops_larger_than_the_images_raise() -> None:
    with pytest.raises(ValueError, match=r"size 8, and the images 7 x 7 pixels.*Set crop_size"):
        augment_cohort(random_cohort(), 0, size=8, seed=0)
    with pytest.raises(ValueError, match="no larger than the images"):
        central_crop(np.zeros((2, 5, 9, 1)), 6)
