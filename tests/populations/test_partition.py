import zlib
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from fedpax.data import (
    Source,
    partition_by_field,
    partition_by_quantity,
    partition_by_shards,
    partition_dirichlet,
    partition_iid,
    partition_natural,
    partition_pachinko,
)
from fedpax.populations import partition as partition_module
from fedpax.populations.assignment import sort_positions, top_up
from fedpax.populations.client_arrays import as_ragged
from fedpax.populations.partition import (
    Partition,
    check_partition,
    partition_checksum,
)

Labels = NDArray[np.int64]
# Every partition that takes a seed, as a function of labels, participants and the seed.
SEEDED: dict[str, Callable[[Labels, int, int], Partition]] = {
    "iid": lambda labels, n, seed: partition_iid(len(labels), n, seed=seed),
    "dirichlet": lambda labels, n, seed: partition_dirichlet(labels, n, alpha=0.3, seed=seed),
    "dirichlet, extreme": lambda labels, n, seed: partition_dirichlet(
        labels, n, alpha=1e-200, seed=seed
    ),
    "dirichlet, equal": lambda labels, n, seed: partition_dirichlet(
        labels, n, alpha=0.3, equal_sizes=True, seed=seed
    ),
    "dirichlet, equal, extreme": lambda labels, n, seed: partition_dirichlet(
        labels, n, alpha=1e-200, equal_sizes=True, seed=seed
    ),
    "pachinko": lambda labels, n, seed: partition_pachinko(labels, labels // 3, n, seed=seed),
    "pachinko, extreme": lambda labels, n, seed: partition_pachinko(
        labels, labels % 2, n, alpha=1e-200, beta=1e-200, seed=seed
    ),
    "shards": lambda labels, n, seed: partition_by_shards(
        labels, n, shards_per_participant=1, seed=seed
    ),
    "quantity, Dirichlet": lambda labels, n, seed: partition_by_quantity(
        len(labels), n, alpha=0.1, seed=seed
    ),
    "quantity, log-normal": lambda labels, n, seed: partition_by_quantity(
        len(labels), n, sigma=3.0, seed=seed
    ),
}


@pytest.mark.parametrize("name", SEEDED)
@given(st.lists(st.integers(-5, 9), min_size=1, max_size=120), st.data())
def test_every_example_has_one_participant_and_every_participant_an_example(
    name: str, labels: list[int], data: st.DataObject
) -> None:
    participants = data.draw(st.integers(1, len(labels)))
    seed = data.draw(st.integers(-5, 2**64 - 1))
    parts = SEEDED[name](np.array(labels), participants, seed)
    check_partition(parts, participants, len(labels), "clients")
    assert sum(map(len, parts)) == len(labels)
    for indices in parts:
        assert indices.dtype == np.int64
        assert np.array_equal(indices, np.sort(indices))
    assert partition_checksum(parts) == partition_checksum(
        SEEDED[name](np.array(labels), participants, seed)
    )


@pytest.mark.parametrize("name", SEEDED)
def test_a_partition_depends_on_its_arguments_alone(name: str, rng: np.random.Generator) -> None:
    labels = rng.integers(0, 9, 500)
    np.random.seed(1)
    first = SEEDED[name](labels, 7, 5)
    np.random.seed(2)
    assert partition_checksum(SEEDED[name](labels.copy(), 7, 5)) == partition_checksum(first)
    assert np.random.randint(2**31) == np.random.RandomState(2).randint(2**31)
    assert partition_checksum(SEEDED[name](labels, 7, 6)) != partition_checksum(first)


@given(
    st.lists(st.lists(st.integers(0, 2**40), max_size=4), max_size=9),
    st.sampled_from([1, 2, 2**16]),
)
def test_the_checksum_is_over_the_bytes_of_each_part_with_a_bar_after_it(
    parts: list[list[int]], together: int
) -> None:
    arrays = [np.array(part, np.int64) for part in parts]
    written = b"".join(array.astype("<i8").tobytes() + b"|" for array in arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_module, "CHECKSUM_PARTS", together)
        assert partition_checksum(arrays) == zlib.crc32(written)
        assert partition_checksum(as_ragged(arrays)) == zlib.crc32(written)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(31, 2**62))
def test_positions_are_sorted_as_a_stable_argsort_does(keys: list[int], limit: int) -> None:
    expected = np.argsort(np.array(keys, np.int64), kind="stable")
    for most in (31, limit):  # the packed integers fit 63 bits, or may not
        assert np.array_equal(sort_positions(np.array(keys, np.int64), most), expected)


def test_a_partition_is_a_sequence_of_two_arrays() -> None:
    parts = partition_by_quantity(50, 6, alpha=0.5)
    assert isinstance(parts, Sequence) and len(parts) == 6
    assert [p.tolist() for p in parts[1:3]] == [parts[1].tolist(), parts[2].tolist()]
    assert parts[-1].tolist() == parts[5].tolist()
    assert parts.sizes().tolist() == [len(indices) for indices in parts]
    assert parts[2].base is parts.indices
    with pytest.raises(IndexError):
        parts[6]
    assert str(parts) == "RaggedPartition(6 participants, 50 examples)"


# Saved states identify their partition by this checksum: it must not change.
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("iid", 2970337312),
        ("dirichlet", 1123981990),
        ("dirichlet, extreme", 3007346862),
        ("dirichlet, equal", 69243031),
        ("dirichlet, equal, extreme", 2228441050),
        ("pachinko", 3521251364),
        ("pachinko, extreme", 2277423541),
        ("shards", 3835884215),
        ("quantity, Dirichlet", 3719552079),
        ("quantity, log-normal", 2647857526),
    ],
)
def test_the_partitions_are_fixed(name: str, number: int) -> None:
    assert partition_checksum(SEEDED[name](np.arange(60) % 10, 4, 3)) == number


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 100))
def test_iid_has_all_examples_once_in_parts_of_equal_size(
    examples: int, participants: int, seed: int
) -> None:
    if participants > examples:
        with pytest.raises(ValueError, match=f"use {examples} participants or fewer"):
            partition_iid(examples, participants, seed=seed)
        return
    parts = partition_iid(examples, participants, seed=seed)
    assert len(parts) == participants
    assert sorted(np.concatenate(parts).tolist()) == list(range(examples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 100))
def test_every_participant_has_min_examples(participants: int, least: int, seed: int) -> None:
    labels = np.arange(participants * least + seed) % 7
    for parts in (
        partition_dirichlet(labels, participants, alpha=0.01, min_examples=least, seed=seed),
        partition_by_quantity(len(labels), participants, alpha=0.01, min_examples=least, seed=seed),
        partition_by_quantity(len(labels), participants, sigma=9, min_examples=least, seed=seed),
    ):
        assert min(map(len, parts)) >= least


def test_top_up_moves_examples_one_at_a_time_from_the_largest(rng: np.random.Generator) -> None:
    for _ in range(20):
        participants, least = int(rng.integers(2, 12)), int(rng.integers(1, 6))
        before = np.bincount(rng.integers(0, participants, 15), minlength=participants) ** 2
        expected = before.copy()
        if before.sum() < participants * least:
            continue
        while (expected < least).any():
            expected[expected.argmin()] += 1
            expected[expected.argmax()] -= 1
        owner = rng.permutation(np.repeat(np.arange(participants), before))
        kept = owner.copy()
        top_up(owner, participants, least)
        after = np.bincount(owner, minlength=participants)
        assert np.array_equal(np.sort(after), np.sort(expected))
        assert (owner != kept).sum() == np.maximum(least - before, 0).sum()


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 40))
def test_shards_that_do_not_divide_differ_by_one(participants: int, shards: int, more: int) -> None:
    labels = np.arange(participants * shards + more)
    parts = partition_by_shards(labels, participants, shards_per_participant=shards)
    length = len(labels) // (participants * shards)
    for indices in parts:
        assert shards * length <= len(indices) <= shards * (length + 1)
        assert np.count_nonzero(np.diff(indices) > 1) < shards


def test_sizes_have_the_spread_of_their_distribution() -> None:
    sizes = [len(indices) for indices in partition_by_quantity(400_000, 2000, sigma=1.5)]
    assert np.std(np.log(sizes)) == pytest.approx(1.5, rel=0.05)
    sizes = [len(indices) for indices in partition_by_quantity(400_000, 2000, alpha=0.5)]
    # For Dir(0.5) over many participants the coefficient of variation is sqrt(1 / 0.5).
    assert np.std(sizes) / np.mean(sizes) == pytest.approx(np.sqrt(2), rel=0.1)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 15))
def test_by_field_keeps_groups_together(values: list[int], participants: int) -> None:
    source = [{"client": np.int64(value)} for value in values]
    if participants > len(set(values)):
        with pytest.raises(ValueError, match="values of the field 'client' are too few"):
            partition_by_field(source, "client", participants)
        return
    parts = partition_by_field(source, "client", participants)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(values)))
    owners = [{values[index] for index in part} for part in parts]
    assert all(owners)
    assert sum(map(len, owners)) == len(set(values))


def test_by_field_assigns_each_group_to_the_smallest_participant(rng: np.random.Generator) -> None:
    values = np.minimum(rng.zipf(1.5, 400), 60)
    source = [{"client": value, "size": int(rng.integers(1, 9))} for value in values]
    groups = {value: np.flatnonzero(values == value) for value in np.unique(values)}
    sizes = {value: sum(source[i]["size"] for i in held) for value, held in groups.items()}
    held: list[list[int]] = [[] for _ in range(7)]
    for value in sorted(groups, key=lambda value: (-sizes[value], groups[value][0])):
        loads = [(sum(source[i]["size"] for i in part), len(part)) for part in held]
        held[loads.index(min(loads))] += groups[value].tolist()
    parts = partition_by_field(source, "client", 7, size=lambda example: example["size"])
    assert [part.tolist() for part in parts] == [sorted(part) for part in held]


@given(st.lists(st.sampled_from([b"a", b"bb", "c", 3, -4]), min_size=1, max_size=60))
def test_natural_makes_every_value_a_participant(values: list[Any]) -> None:
    parts = partition_natural([{"writer": value} for value in values], "writer")
    check_partition(parts, len(set(values)), len(values), "clients")
    assert sum(map(len, parts)) == len(values)
    for indices, name in zip(parts, parts.names, strict=True):
        assert {values[index] for index in indices} == {name}


def test_natural_sorts_participants_by_value(rng: np.random.Generator) -> None:
    labels = rng.permutation(np.arange(200) % 30 - 10)
    parts = partition_natural([{"label": label} for label in labels], "label")
    assert parts.names == list(range(-10, 20))
    assert [indices.tolist() for indices in parts] == [
        np.flatnonzero(labels == k).tolist() for k in parts.names
    ]


@pytest.mark.parametrize("value", [np.zeros(3), np.zeros((0, 2))])
def test_a_field_of_arrays_raises(value: NDArray[Any]) -> None:
    for make in (partition_natural, lambda *args: partition_by_field(*args, 1)):
        with pytest.raises(ValueError, match=r"holds arrays.*name another field"):
            make([{"image": value}], "image")


def test_by_field_gives_islands_of_real_modules_equal_amounts(
    text: Callable[[str], Source],
) -> None:
    source = text("train")
    parts = partition_by_field(source, "client", 4, size=lambda example: len(example["text"]))
    clients = [{source[int(index)]["client"] for index in part} for part in parts]
    assert not set.intersection(*clients)
    amounts = [sum(len(source[int(index)]["text"]) for index in part) for part in parts]
    assert max(amounts) < 1.05 * min(amounts)


def test_a_missing_field_raises_and_lists_the_existing_ones() -> None:
    with pytest.raises(KeyError, match="no field 'author', but 'client', 'text'"):
        partition_by_field([{"client": "a", "text": "b"}], "author", 1)


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ([[0], [1]], "has 2 parts, expected 3, one for each of the islands"),
        ([[0], [], [1]], "leaves islands 1 without examples"),
        ([[0], [1], [5]], "has index 5, but the source has examples 0 to 4"),
        ([[0], [-1], [2]], "has index -1"),
        ([[0, 3], [1], [2, 3]], "assigns example 3 twice"),
        ([[0], [1.5], [2]], "islands 1 is float64"),
    ],
)
def test_a_partition_that_does_not_fit_raises(partition: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_partition([np.array(part) for part in partition], 3, 5, "islands")


@pytest.mark.parametrize("participants", [0, -2])
def test_num_participants_below_1_raises(participants: int) -> None:
    with pytest.raises(
        ValueError, match=f"num_participants is {participants}, expected at least 1"
    ):
        partition_iid(5, participants)
