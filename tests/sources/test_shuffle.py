import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import partition_iid
from fedpax.sources.shuffle import hash_key, shuffled_in, shuffled_index


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_shuffled_index_is_a_permutation(size: int, key: int) -> None:
    order = shuffled_index(np.arange(size), size, np.uint64(key))
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


@given(st.integers(1, 2**40), st.data())
def test_large_sizes_have_no_collisions_and_no_values_out_of_range(
    size: int, data: st.DataObject
) -> None:
    places = st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True)
    index = data.draw(places)
    order = shuffled_index(index, size, hash_key(1))
    assert order.min() >= 0
    assert order.max() < size
    assert len(set(order.tolist())) == len(index)


def test_broadcasting_equals_single_calls(rng: np.random.Generator) -> None:
    sizes = rng.integers(1, 50, (6, 1))
    index = rng.integers(0, 1000, (6, 20)) % sizes
    keys = hash_key(3, np.arange(6)[:, None])
    together = shuffled_index(index, sizes, keys)
    for i, j in np.ndindex(index.shape):
        assert together[i, j] == shuffled_index(index[i, j], sizes[i, 0], hash_key(3, i))


def test_orders_pass_chi_square_tests() -> None:
    # Chi-square of the 24 orders of 4 elements: mean 23, standard deviation 6.8.
    keys = hash_key(7, np.arange(24_000))
    orders = shuffled_index(np.arange(4)[None], 4, keys[:, None])
    counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 60
    # The positions of 100 elements: mean 9801, standard deviation 140.
    orders = shuffled_index(np.arange(100)[None], 100, hash_key(3, np.arange(2000))[:, None])
    counts = np.stack([np.bincount(column, minlength=100) for column in orders.T])
    assert ((counts - 20) ** 2 / 20).sum() < 10_500


def test_the_permutations_are_fixed() -> None:
    # Runs resume from states of earlier versions, so these orders are part of the format.
    assert int(hash_key(0)) == 16294208416658607535
    assert shuffled_index(np.arange(10), 10, hash_key(1, 2)).tolist() == [
        6,
        4,
        9,
        2,
        5,
        7,
        8,
        0,
        1,
        3,
    ]


@pytest.mark.parametrize(
    ("largest", "checksum"),
    [
        (4, 3750923806),
        (29, 3206275880),
        (64, 2497653035),
        (200, 1594452258),
        (3000, 2908456665),
        (10**6, 481591168),
    ],
)
def test_the_permutations_of_each_way_to_compute_them_are_fixed(
    largest: int, checksum: int
) -> None:
    # Words, tables of outputs, tables of hashes, and hashes of each element.
    sizes = np.minimum(largest, np.arange(largest - 3, largest + 40))
    counts = np.minimum(sizes, 100)
    sequence = np.repeat(np.arange(len(sizes)), counts)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    shuffled = shuffled_in(sequence, index, sizes, hash_key(1, np.arange(len(sizes))))
    assert zlib.crc32(shuffled.astype("<i8").tobytes()) == checksum


def test_the_permutations_of_very_different_sizes_are_fixed() -> None:
    sizes = np.arange(40) ** 2  # tables of several widths
    sequence = np.repeat(np.arange(40), sizes)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    shuffled = shuffled_in(sequence, index, sizes, hash_key(1, np.arange(40)))
    assert zlib.crc32(shuffled.astype("<i8").tobytes()) == 3579917818


def test_hash_key_takes_negative_and_large_numbers() -> None:
    assert hash_key(-1) == hash_key(2**64 - 1)
    assert len({int(hash_key(0, k)) for k in range(-500, 500)}) == 1000


def test_hash_key_raises_no_warnings(recwarn: pytest.WarningsRecorder) -> None:
    hash_key(2**63, np.arange(5))
    shuffled_index(3, 10, hash_key(1))
    assert not recwarn.list


@pytest.mark.parametrize("seed", [0.5, np.nan, "2", 10**23, 1j, np.timedelta64(2, "s"), None])
def test_a_seed_that_is_not_an_integer_is_named(seed):
    for draw in (hash_key, lambda seed: partition_iid(2, 1, seed=seed)):
        with pytest.raises(TypeError, match=r"seed or .* is .*, expected an integer of at most 64"):
            draw(seed)


def test_many_short_sequences_are_those_of_one_at_a_time() -> None:
    rng = np.random.default_rng(0)
    sizes, keys = rng.integers(1, 40, 60), rng.integers(0, 2**63, 60)
    together = shuffled_index(
        np.concatenate([np.arange(size) for size in sizes]),
        np.repeat(sizes, sizes),
        np.repeat(keys, sizes),
    )
    alone = [
        int(shuffled_index(i, n, k)) for n, k in zip(sizes, keys, strict=True) for i in range(n)
    ]
    assert together.tolist() == alone


def test_sizes_of_one_key_and_of_many_kinds_give_permutations(rng: np.random.Generator) -> None:
    # Short and long sequences together, and equal keys with different sizes beside each other.
    sizes = np.concatenate([rng.integers(1, 40, 50), [1, 4, 5, 16, 17, 64, 65, 70_000]])
    for keys in (np.zeros(len(sizes), np.uint64), hash_key(3, np.arange(len(sizes)))):
        index = np.concatenate([np.arange(size) for size in sizes])
        of = np.repeat(np.arange(len(sizes)), sizes)
        together = shuffled_index(index, sizes[of], keys[of])
        for number, (size, key) in enumerate(zip(sizes, keys, strict=True)):
            alone = shuffled_index(np.arange(size), size, key)
            np.testing.assert_array_equal(together[of == number], alone)
            np.testing.assert_array_equal(np.sort(alone), np.arange(size))


@pytest.mark.each_value
@pytest.mark.parametrize("largest", [4, 16, 64, 65, 256, 257, 5000])
@pytest.mark.parametrize("most", [None, 3])
def test_elements_of_sequences_are_those_of_their_sizes_and_keys(
    largest: int, most: int | None
) -> None:
    rng = np.random.default_rng(largest)
    sizes = np.append(rng.integers(0, largest + 1, 30), [largest, 0])
    keys = rng.integers(0, 2**64, 32, np.uint64)
    counts = np.minimum(sizes, most or largest)
    order = rng.permutation(counts.sum())
    sequence = np.repeat(np.arange(32), counts)[order]
    index = np.concatenate([np.arange(count) for count in counts])[order]
    shuffled = shuffled_in(sequence, index, sizes, keys)
    expected = shuffled_index(index, sizes[sequence], keys[sequence])
    np.testing.assert_array_equal(shuffled, expected, strict=True)
    some = zip(index[:50], sequence[:50], strict=True)
    alone = [shuffled_index(i, sizes[s], keys[s]) for i, s in some]
    np.testing.assert_array_equal(shuffled[:50], alone)


@pytest.mark.parametrize("size", [2**30, 2**30 + 1, 2**31])
def test_many_elements_of_a_long_sequence_are_those_of_a_few_at_a_time(size: int) -> None:
    index = np.random.default_rng(size).integers(0, size, 2**16)
    few = [shuffled_index(part, size, hash_key(3)) for part in np.split(index, 2)]
    np.testing.assert_array_equal(
        shuffled_index(index, size, hash_key(3)), np.concatenate(few), strict=True
    )
