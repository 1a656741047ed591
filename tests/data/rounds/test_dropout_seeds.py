"""The seeds of dropout."""

import numpy as np

from fedpax import Cohort
from fedpax.data.rounds.augmentation import DROPOUT_SEED, add_dropout_seeds

LABELS = np.arange(3 * 4 * 5).reshape(3, 4, 5)


def seeds(clients: list[int], round_number: int, seed: int) -> np.ndarray:
    cohort = Cohort({"label": LABELS[: len(clients)]}, client_ids=np.array(clients))
    after = add_dropout_seeds(cohort, round_number, seed=seed)
    np.testing.assert_array_equal(after.batches["label"], cohort.batches["label"])
    return after.batches[DROPOUT_SEED]


def test_each_example_of_each_step_has_a_seed_of_its_own() -> None:
    result = np.stack([seeds([4, 0, -1], round_number, 7) for round_number in range(20)])
    assert (result.shape, result.dtype) == ((20, 3, 4, 5), np.uint32)
    assert len(np.unique(result)) == result.size
    assert result.max() > 0.9 * 2**32


def test_the_seeds_depend_on_seed_round_and_client_alone() -> None:
    first = seeds([4, 0, 9], 1, 7)
    np.testing.assert_array_equal(seeds([9, 4], 1, 7), first[[2, 0]])
    for other in (seeds([4, 0, 9], 2, 7), seeds([4, 0, 9], 1, 8)):
        assert not (first == other).any()
