"""Arrays of cohorts, which JAX takes over without a copy."""

import jax
import numpy as np
import pytest

from fedpax.data import ClientSampler, cohort_rounds
from fedpax.data.rounds.aligned_arrays import ALIGNMENT, take_aligned
from fedpax.data.rounds.preprocess import preprocess_images


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "?", "i8", "O", "U5"])
@pytest.mark.parametrize("shape", [(9,), (9, 3, 2), (9, 0)])
def test_rows_are_those_of_indexing(dtype, shape):
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    for indices in (np.array([], np.int64), np.array([8, 0, 0, 3])):
        rows = take_aligned(values, indices)
        assert rows.dtype == values.dtype
        np.testing.assert_array_equal(rows, values[indices])


@pytest.mark.parametrize("preprocess", [dict, preprocess_images])
def test_a_cpu_device_takes_a_cohort_over_in_place(preprocess):
    rng = np.random.default_rng(0)
    examples = {
        "image": rng.integers(0, 256, (60, 28, 28, 1), np.uint8),
        "label": rng.integers(0, 10, 60, np.int32),
    }
    clients = np.array_split(rng.permutation(60), 5)
    rounds = cohort_rounds(
        examples, clients, ClientSampler(5, 3), batch_size=4, preprocess=preprocess
    )
    image = next(rounds).batches["image"]
    assert image.ctypes.data % ALIGNMENT == 0
    placed = jax.device_put(image, jax.devices("cpu")[0])
    assert placed.unsafe_buffer_pointer() == image.ctypes.data
