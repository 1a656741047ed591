from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import Source, partition_by_field, partition_iid
from fedpax.data.partition import check_partition, checksum


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 100))
def test_iid_covers_all_examples_once_and_evenly(
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


def test_iid_depends_on_the_seed_alone() -> None:
    first, again, other = (partition_iid(100, 4, seed=seed) for seed in (5, 5, 6))
    assert checksum(first) == checksum(again) != checksum(other)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 15))
def test_by_field_keeps_groups_together(values: list[int], participants: int) -> None:
    source = [{"client": np.int64(value)} for value in values]
    if participants > len(set(values)):
        with pytest.raises(ValueError, match="values of the field 'client' cannot be shared"):
            partition_by_field(source, "client", participants)
        return
    parts = partition_by_field(source, "client", participants)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(values)))
    holders = [{values[index] for index in part} for part in parts]
    assert all(holders)
    assert sum(map(len, holders)) == len(set(values))


def test_by_field_gives_islands_of_real_modules_equal_amounts(
    text: Callable[[str], Source],
) -> None:
    source = text("train")
    parts = partition_by_field(source, "client", 4, size=lambda example: len(example["text"]))
    clients = [{source[int(index)]["client"] for index in part} for part in parts]
    assert not set.intersection(*clients)
    amounts = [sum(len(source[int(index)]["text"]) for index in part) for part in parts]
    assert max(amounts) < 1.05 * min(amounts)


def test_by_field_says_which_fields_there_are() -> None:
    with pytest.raises(KeyError, match="no field 'author', but 'client', 'text'"):
        partition_by_field([{"client": "a", "text": "b"}], "author", 1)


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ([[0], [1]], "has 2 parts, but there are 3 islands"),
        ([[0], [], [1]], "leaves islands 1 without examples"),
        ([[0], [1], [5]], "names example 5, but the source has examples 0 to 4"),
        ([[0], [-1], [2]], "names example -1"),
        ([[0, 3], [1], [2, 3]], "gives example 3 out twice"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(partition: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_partition([np.array(part, np.int64) for part in partition], 3, 5, "islands")


@pytest.mark.parametrize("participants", [0, -2])
def test_no_participants_are_refused(participants: int) -> None:
    with pytest.raises(ValueError, match=f"at least one participant, not {participants}"):
        partition_iid(5, participants)
