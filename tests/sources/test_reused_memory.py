"""Arrays of cohorts, which JAX takes over without a copy."""

import jax
import numpy as np
import pytest

from fedpax.data import ClientSampler, cohort_rounds, load
from fedpax.data.rounds.labeled_examples import preprocess_images
from fedpax.sources import reused_memory
from fedpax.sources.reused_memory import ALIGNMENT, ReusedMemory, take_aligned


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "?", "i8", "O", "U5"])
@pytest.mark.parametrize("shape", [(9,), (9, 3, 2), (9, 0)])
def test_rows_are_those_of_indexing(dtype, shape):
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    for indices in (np.array([], np.int64), np.array([8, 0, 0, 3])):
        rows = take_aligned(values, indices, ReusedMemory())
        assert rows.dtype == values.dtype
        np.testing.assert_array_equal(rows, values[indices])


def test_two_threads_gather_the_rows_of_one(monkeypatch):
    rng = np.random.default_rng(1)
    values, indices = rng.normal(size=(50, 3)), rng.integers(0, 50, 101)
    monkeypatch.setattr(reused_memory, "SHARED_BYTES", 100)
    rows = take_aligned(values, indices, ReusedMemory())
    np.testing.assert_array_equal(rows, values[indices])


def test_memory_is_written_again_only_when_nothing_refers_to_it():
    rng = np.random.default_rng(2)
    memory, values = ReusedMemory(), rng.normal(size=(40, 3)).astype(np.float32)
    expected, kept, addresses = [], [], set()
    for number in range(12):
        indices = rng.integers(0, 40, 20)
        rows = take_aligned(values, indices, memory)
        addresses.add(rows.ctypes.data)
        if number % 4 == 0:
            expected.append(values[indices][3:])
            # A view, and an array that a device has taken over in place.
            kept.append(rows[3:] if number else jax.device_put(rows, jax.devices("cpu")[0])[3:])
        elif number % 4 == 1:
            expected.append(values[indices])
            kept.append(jax.device_put(rows, jax.devices("cpu")[0]))
        del rows
    assert len(addresses) < 12
    for rows, numbers in zip(kept, expected, strict=True):
        np.testing.assert_array_equal(rows, numbers)


def test_zeros_of_a_read_only_array_are_not_written_again(monkeypatch):
    monkeypatch.setattr(reused_memory, "_LONG_PADDING", 1)
    memory, values = ReusedMemory(), np.random.default_rng(4).normal(size=(9, 3))
    indices, padding = np.arange(8), np.arange(8).reshape(2, 4) % 4 > 1
    expected = np.where(padding.reshape(-1, 1), 0, values[:8])
    rows = take_aligned(values, indices, memory, padding, read_only=True)
    np.testing.assert_array_equal(rows, expected)
    assert not rows.flags.writeable
    rows.flags.writeable = True
    rows[2:4] = 5  # marks what is not written
    del rows
    rows = take_aligned(values, indices, memory, padding, read_only=True)
    np.testing.assert_array_equal(rows[:5], [*values[:2], [5] * 3, [5] * 3, values[4]])
    del rows
    for _ in range(2):  # a user can have written to the array of the first time
        rows = take_aligned(values, indices, memory, padding)
        np.testing.assert_array_equal(rows[4:], expected[4:])
        rows.fill(7)
        del rows
    rows = take_aligned(values, indices, memory, padding, read_only=True)
    np.testing.assert_array_equal(rows, expected)


def test_idle_memory_is_bounded():
    memory = ReusedMemory()
    for size in (1000, 700, 1000, 3):
        arrays = [memory.empty((size,), np.float32) for _ in range(9)]
        assert {array.shape for array in arrays} == {(size,)}
        assert len({array.ctypes.data for array in arrays}) == 9 and not memory._idle
        del arrays
        assert [idle.bytes.nbytes for idle in memory._idle] == [4 * size + ALIGNMENT] * 2


@pytest.mark.parametrize("preprocess", [dict, preprocess_images])
@pytest.mark.parametrize("open_examples", [dict, load])
def test_a_stream_writes_its_memory_again(open_examples, preprocess):
    rng = np.random.default_rng(3)
    image, label = rng.integers(0, 256, (60, 5), np.uint8), rng.integers(0, 10, 60)
    examples = open_examples({"image": image, "label": label})
    clients = np.array_split(rng.permutation(60), 6)

    def stream():
        return cohort_rounds(
            examples, clients, ClientSampler(6, 3), batch_size=4, preprocess=preprocess, seed=4
        )

    kept = [cohort.batches for cohort, _ in zip(stream(), range(6), strict=False)]
    addresses = set()
    for cohort, expected in zip(stream(), kept, strict=False):
        np.testing.assert_array_equal(cohort.batches["image"], expected["image"])
        addresses.add(cohort.batches["image"].ctypes.data)
    assert len(addresses) <= 3 < len({batches["image"].ctypes.data for batches in kept})


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


@pytest.mark.parametrize("wrong", [0, 999])
def test_an_error_of_either_thread_is_raised(monkeypatch, wrong):
    monkeypatch.setattr(reused_memory, "SHARED_BYTES", 0)

    class Failing(np.ndarray):
        def take(self, indices, *arguments):
            if wrong in indices:
                raise MemoryError("no memory")
            return super().take(indices, *arguments)

    values = np.zeros((1000, 100)).view(Failing)
    with pytest.raises(MemoryError, match="no memory"):
        take_aligned(values, np.arange(1000), ReusedMemory())
