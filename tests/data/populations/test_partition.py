import itertools
from collections import Counter
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
from fedpax.data.populations._assignment import frozen_random, top_up
from fedpax.data.populations.label_skew import draw_labels
from fedpax.data.populations.partition import Partition, check_partition, partition_checksum

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


def label_counts(partition: Partition, labels: Labels) -> Labels:
    """[participants, classes]"""
    return np.array(
        [np.bincount(labels[indices], minlength=labels.max() + 1) for indices in partition]
    )


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


def test_the_shares_of_a_label_are_dirichlet_distributed(rng: np.random.Generator) -> None:
    labels = rng.permutation(np.repeat(np.arange(400), 300))
    parts = partition_dirichlet(labels, 5, alpha=0.5)
    shares = label_counts(parts, labels) / 300
    # Of 5 parts of Dir(0.5): mean 1/5, variance 0.2 * 0.8 / (5 * 0.5 + 1); rounding adds 1 / 300.
    assert np.abs(shares.mean(axis=1) - 0.2).max() < 0.05
    assert shares.var(axis=1).mean() == pytest.approx(0.16 / 3.5, rel=0.1)


def test_label_distributions_of_equal_sizes_are_dirichlet_distributed(
    rng: np.random.Generator,
) -> None:
    prior = np.array([0.1, 0.2, 0.3, 0.4])
    labels = rng.choice(4, 100_000, p=prior)
    parts = partition_dirichlet(labels, 1000, alpha=0.5, equal_sizes=True)
    assert {len(indices) for indices in parts} == {100}
    # The first participants find enough of every label. Dir(0.5 * 4 * prior) has the variance
    # prior (1 - prior) / 3, and 100 draws add 1 / 100 of its difference to prior (1 - prior).
    first = label_counts(parts[:700], labels) / 100
    assert np.abs(first.mean(axis=0) - prior).max() < 0.05
    expected = prior * (1 - prior) * (1 / 3 + (1 - 1 / 3) / 100)
    assert np.abs(first.var(axis=0) / expected - 1).max() < 0.15


@pytest.mark.parametrize("equal_sizes", [False, True])
def test_a_large_alpha_makes_participants_alike(
    equal_sizes: bool, rng: np.random.Generator
) -> None:
    labels = rng.integers(0, 10, 20_000)
    parts = partition_dirichlet(labels, 40, alpha=1e7, equal_sizes=equal_sizes)
    counts, even = label_counts(parts, labels), np.bincount(labels) / 40
    if equal_sizes:  # like random samples: chi-square with 40 x 9 degrees of freedom
        assert 250 < ((counts - even) ** 2 / even).sum() < 470
    else:  # rounding, and noise of a few thousandths
        assert np.abs(counts - even).max() < 1.5


def test_a_small_alpha_gives_a_participant_one_label(rng: np.random.Generator) -> None:
    labels = rng.permutation(np.arange(10_000) % 10)
    parts = partition_dirichlet(labels, 50, alpha=1e-6, equal_sizes=True)
    assert ((label_counts(parts, labels) > 0).sum(axis=1) == 1).all()


def test_a_small_alpha_gives_a_label_one_participant(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 10, 10_000)
    counts = label_counts(partition_dirichlet(labels, 50, alpha=1e-6), labels)
    # All examples but one for each of at most 49 participants that would have none.
    assert (counts.max(axis=0) >= counts.sum(axis=0) - 49).all()
    assert sorted(counts.sum(axis=1))[:40] == [1] * 40


def test_labels_with_few_examples_go_to_different_participants() -> None:
    labels = np.arange(1000) % 200  # 5 of each: a share is a twentieth of an example
    sizes = [len(indices) for indices in partition_dirichlet(labels, 100, alpha=1e7)]
    assert max(sizes) < 30


def test_only_the_order_of_label_values_matters(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 9, 300).astype(np.uint8)
    others = labels.astype(np.int64) * 1_000_003 - 10**9
    for equal_sizes in (False, True):
        first, second = (
            partition_dirichlet(each, 6, alpha=0.3, equal_sizes=equal_sizes)
            for each in (labels, others)
        )
        assert partition_checksum(first) == partition_checksum(second)


def one_at_a_time(
    weights: list[float], left: list[int], number: int
) -> dict[tuple[int, ...], float]:
    """Return the probabilities of counts if labels are drawn one at a time."""
    found: dict[tuple[int, ...], float] = {}
    for draws in itertools.product(range(len(left)), repeat=number):
        remaining, probability = list(left), 1.0
        for draw in draws:
            total = sum(w for w, r in zip(weights, remaining, strict=True) if r)
            probability *= weights[draw] / total if remaining[draw] else 0.0
            remaining[draw] -= 1
        counts = tuple(np.subtract(left, remaining).tolist())
        found[counts] = found.get(counts, 0.0) + probability
    return found


def test_draw_labels_equals_drawing_one_at_a_time() -> None:
    # Two groups of labels at once; the first is used up except for one example.
    first, second = ([0.7, 0.2, 0.1], [2, 1, 1], 3), ([0.3, 0.6, 0.1], [2, 2, 3], 4)
    random, trials = frozen_random(0), 5000
    draws = [
        draw_labels(
            random,
            np.array([first[2], second[2]]),
            np.log(first[0] + second[0]),
            np.array([0, 3]),
            np.array(first[1] + second[1]),
        ).tolist()
        for _ in range(trials)
    ]
    for case, part in (first, slice(0, 3)), (second, slice(3, 6)):
        expected = {counts: p for counts, p in one_at_a_time(*case).items() if p}
        seen = Counter(tuple(counts[part]) for counts in draws)
        assert sum(expected.values()) == pytest.approx(1)
        assert seen.keys() == expected.keys()
        for counts, p in expected.items():  # within 4.5 standard deviations
            assert abs(seen[counts] / trials - p) < 4.5 * np.sqrt(p * (1 - p) / trials)


def test_pachinko_gives_participants_few_coarse_labels_and_all_their_labels(
    rng: np.random.Generator,
) -> None:
    labels = rng.permutation(np.arange(50_000) % 100)
    coarse = labels * 7 % 20  # siblings are not neighbors
    parts = partition_pachinko(labels, coarse, 500)
    assert {len(indices) for indices in parts} == {100}
    fine_counts = label_counts(parts, labels)
    coarse_counts = label_counts(parts, coarse)
    # Dir(0.1) over 20 coarse labels: a participant's sum of squared frequencies is 1.1 / 3 in the
    # mean, and 100 draws add 1 / 100 of the rest; Dir(10) over 5: 11 / 51.
    squares = ((coarse_counts / 100) ** 2).sum(axis=1).mean()
    assert squares == pytest.approx(1.1 / 3 + (1 - 1.1 / 3) / 100, rel=0.1)
    siblings = np.array([np.flatnonzero(np.arange(100) * 7 % 20 == c) for c in range(20)])
    within = fine_counts[:250, siblings]  # [participants, coarse, 5], where labels are not used up
    many = within.sum(axis=2) >= 50
    frequencies = within[many] / within[many].sum(axis=1, keepdims=True)
    assert (frequencies**2).sum(axis=1).mean() == pytest.approx(11 / 51 + 0.013, rel=0.05)


def test_pachinko_with_a_small_beta_gives_one_label_of_a_coarse_label() -> None:
    labels = np.repeat(np.arange(100), 100)
    counts = label_counts(partition_pachinko(labels, labels // 5, 20, alpha=1e7, beta=1e-6), labels)
    # Each has about 25 of each of 20 coarse labels, of 5 labels with 100 each.
    present = (counts.reshape(20, 20, 5) > 0).sum(axis=2)
    assert present.mean() < 1.6
    assert (present[:10] > 0).all()  # before coarse labels are used up


def test_shards_are_equal_ranges_of_the_sorted_examples(
    rng: np.random.Generator,
) -> None:
    labels = rng.permutation(np.arange(1200) % 10)  # 40 shards of 30, 4 of each label
    parts = partition_by_shards(labels, 20)
    counts = label_counts(parts, labels)
    assert (counts.sum(axis=1) == 60).all()
    assert set(np.unique(counts)) == {0, 30, 60}
    num_labels = Counter((counts > 0).sum(axis=1).tolist())
    assert num_labels.keys() == {1, 2} and num_labels[2] > num_labels[1]


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


@given(st.lists(st.sampled_from([b"a", b"bb", "c", None, 3, -4]), min_size=1, max_size=60))
def test_natural_makes_every_value_a_participant(values: list[Any]) -> None:
    parts, names = partition_natural([{"writer": value} for value in values], "writer")
    check_partition(parts, len(set(values)), len(values), "clients")
    assert sum(map(len, parts)) == len(values)
    for indices, name in zip(parts, names, strict=True):
        assert {values[index] for index in indices} == {name}


def test_natural_sorts_participants_by_value(rng: np.random.Generator) -> None:
    labels = rng.permutation(np.arange(200) % 30 - 10)
    parts, names = partition_natural([{"label": label} for label in labels], "label")
    assert names == list(range(-10, 20))
    assert [indices.tolist() for indices in parts] == [
        np.flatnonzero(labels == k).tolist() for k in names
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


ALPHA = "expected a positive, finite number"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: partition_dirichlet([0, 1], 1, alpha=0), f"alpha is 0, {ALPHA}"),
        (
            lambda: partition_dirichlet([0, 1], 1, alpha=-1.0),
            "the smaller it is, the more participants",
        ),
        (lambda: partition_dirichlet([0, 1], 1, alpha=np.nan), f"alpha is nan, {ALPHA}"),
        (lambda: partition_dirichlet([0, 1], 1, alpha=np.inf), f"alpha is inf, {ALPHA}"),
        (lambda: partition_dirichlet([0, 1], 3, alpha=1), "use 2 participants or fewer"),
        (
            lambda: partition_dirichlet([0, 1], 0, alpha=1),
            "num_participants is 0, expected at least 1",
        ),
        (
            lambda: partition_dirichlet(np.arange(9), 4, alpha=1, min_examples=3),
            "with at least 3 each: use 3 participants or fewer",
        ),
        (
            lambda: partition_dirichlet([0, 1], 1, alpha=1, min_examples=0),
            "min_examples is 0, expected at least 1",
        ),
        (
            lambda: partition_dirichlet(np.eye(3, dtype=int), 1, alpha=1),
            r"labels has dtype int64 and shape \[3, 3\], expected one integer.*argmax",
        ),
        (lambda: partition_dirichlet(["a", "b"], 1, alpha=1), "Convert strings with np.unique"),
        (lambda: partition_dirichlet([0.0, 1.0], 1, alpha=1), "labels has dtype float64"),
        (lambda: partition_pachinko([0, 1], ["x", "y"], 1), "coarse_labels has dtype <U1"),
        (
            lambda: partition_pachinko([0, 1], [0], 1),
            "2 labels and 1 coarse labels: give one of each",
        ),
        (
            lambda: partition_pachinko([4, 5, 4], [2, 1, 9], 1),
            "Label 4 has the coarse labels 2 and 9.*use different labels",
        ),
        (lambda: partition_pachinko([0, 1], [0, 0], 3), "use 2 participants or fewer"),
        (lambda: partition_pachinko([0, 1], [0, 0], 1, alpha=0), f"alpha is 0, {ALPHA}"),
        (lambda: partition_pachinko([0, 1], [0, 0], 1, beta=-2), f"beta is -2, {ALPHA}"),
        (lambda: partition_by_shards([0, 1, 2], 2), "at least 2 each: use 1 participants or fewer"),
        (
            lambda: partition_by_shards([0, 1, 2], 2, shards_per_participant=0),
            "shards_per_participant is 0, expected at least 1",
        ),
        (lambda: partition_by_quantity(9, 3), "alpha is None and sigma is None.*give alpha"),
        (lambda: partition_by_quantity(9, 3, alpha=1, sigma=2), "alpha is 1 and sigma is 2"),
        (lambda: partition_by_quantity(9, 3, sigma=0), "the larger it is, the more sizes differ"),
        (lambda: partition_by_quantity(9, 3, alpha=0), "the smaller it is, the more sizes differ"),
        (lambda: partition_by_quantity(9, 10, alpha=1), "use 9 participants or fewer"),
        (lambda: partition_natural([], "x"), "0 values of the field 'x' are too few"),
    ],
)
def test_bad_arguments_raise(make: Callable[[], Sequence[Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
