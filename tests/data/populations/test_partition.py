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
from fedpax.data.populations.label_skew import _draw, _random, _top_up
from fedpax.data.populations.partition import Partition, check_partition, checksum

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
    return np.array([np.bincount(labels[held], minlength=labels.max() + 1) for held in partition])


@pytest.mark.parametrize("name", SEEDED)
@given(st.lists(st.integers(-5, 9), min_size=1, max_size=120), st.data())
def test_every_example_has_one_holder_and_every_participant_an_example(
    name: str, labels: list[int], data: st.DataObject
) -> None:
    participants = data.draw(st.integers(1, len(labels)))
    seed = data.draw(st.integers(-5, 2**64 - 1))
    parts = SEEDED[name](np.array(labels), participants, seed)
    check_partition(parts, participants, len(labels), "clients")
    assert sum(map(len, parts)) == len(labels)
    for held in parts:
        assert held.dtype == np.int64
        assert np.array_equal(held, np.sort(held))
    assert checksum(parts) == checksum(SEEDED[name](np.array(labels), participants, seed))


@pytest.mark.parametrize("name", SEEDED)
def test_a_partition_depends_on_its_arguments_alone(name: str, rng: np.random.Generator) -> None:
    labels = rng.integers(0, 9, 500)
    np.random.seed(1)
    first = SEEDED[name](labels, 7, 5)
    np.random.seed(2)
    assert checksum(SEEDED[name](labels.copy(), 7, 5)) == checksum(first)
    assert np.random.randint(2**31) == np.random.RandomState(2).randint(2**31)
    assert checksum(SEEDED[name](labels, 7, 6)) != checksum(first)


# Runs go on from states that name their partition by this number: it must not change.
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
def test_never_changes(name: str, number: int) -> None:
    assert checksum(SEEDED[name](np.arange(60) % 10, 4, 3)) == number


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


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 100))
def test_min_examples_is_kept(participants: int, least: int, seed: int) -> None:
    labels = np.arange(participants * least + seed) % 7
    for parts in (
        partition_dirichlet(labels, participants, alpha=0.01, min_examples=least, seed=seed),
        partition_by_quantity(len(labels), participants, alpha=0.01, min_examples=least, seed=seed),
        partition_by_quantity(len(labels), participants, sigma=9, min_examples=least, seed=seed),
    ):
        assert min(map(len, parts)) >= least


def test_the_missing_are_taken_one_by_one_from_whoever_has_most(rng: np.random.Generator) -> None:
    for _ in range(20):
        participants, least = int(rng.integers(2, 12)), int(rng.integers(1, 6))
        before = np.bincount(rng.integers(0, participants, 15), minlength=participants) ** 2
        expected = before.copy()
        if before.sum() < participants * least:
            continue
        while (expected < least).any():
            expected[expected.argmin()] += 1
            expected[expected.argmax()] -= 1
        holder = rng.permutation(np.repeat(np.arange(participants), before))
        kept = holder.copy()
        _top_up(holder, participants, least)
        after = np.bincount(holder, minlength=participants)
        assert np.array_equal(np.sort(after), np.sort(expected))
        assert (holder != kept).sum() == np.maximum(least - before, 0).sum()


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
    assert {len(held) for held in parts} == {100}
    # Those who come first find enough of every label. Dir(0.5 * 4 * prior) has the variance
    # prior (1 - prior) / 3, and 100 draws add 1 / 100 of what that lacks to prior (1 - prior).
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
    if equal_sizes:  # as different as random samples: chi-square of 40 x 9 degrees of freedom
        assert 250 < ((counts - even) ** 2 / even).sum() < 470
    else:  # shares rounded up or down, after noise of a few thousandths
        assert np.abs(counts - even).max() < 1.5


def test_a_small_alpha_gives_a_participant_one_label(rng: np.random.Generator) -> None:
    labels = rng.permutation(np.arange(10_000) % 10)
    parts = partition_dirichlet(labels, 50, alpha=1e-6, equal_sizes=True)
    assert ((label_counts(parts, labels) > 0).sum(axis=1) == 1).all()


def test_a_small_alpha_gives_a_label_one_participant(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 10, 10_000)
    counts = label_counts(partition_dirichlet(labels, 50, alpha=1e-6), labels)
    # All but one example for each of at most 49 participants who would have none.
    assert (counts.max(axis=0) >= counts.sum(axis=0) - 49).all()
    assert sorted(counts.sum(axis=1))[:40] == [1] * 40


def test_labels_with_few_examples_go_to_different_participants() -> None:
    labels = np.arange(1000) % 200  # 5 of each, so that a share is a twentieth of an example
    sizes = [len(held) for held in partition_dirichlet(labels, 100, alpha=1e7)]
    assert max(sizes) < 30


def test_only_the_order_of_labels_matters(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 9, 300).astype(np.uint8)
    others = labels.astype(np.int64) * 1_000_003 - 10**9
    for equal_sizes in (False, True):
        first, second = (
            partition_dirichlet(each, 6, alpha=0.3, equal_sizes=equal_sizes)
            for each in (labels, others)
        )
        assert checksum(first) == checksum(second)


def one_by_one(weights: list[float], left: list[int], number: int) -> dict[tuple[int, ...], float]:
    """The probabilities of counts when labels are drawn one by one until none is left of each."""
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


def test_draws_come_to_drawing_one_by_one() -> None:
    # Two groups of labels at once, of which the first must be emptied but for one.
    first, second = ([0.7, 0.2, 0.1], [2, 1, 1], 3), ([0.3, 0.6, 0.1], [2, 2, 3], 4)
    random, trials = _random(0), 5000
    draws = [
        _draw(
            random,
            np.array([first[2], second[2]]),
            np.log(first[0] + second[0]),
            np.array([0, 3]),
            np.array(first[1] + second[1]),
        ).tolist()
        for _ in range(trials)
    ]
    for case, part in (first, slice(0, 3)), (second, slice(3, 6)):
        expected = {counts: p for counts, p in one_by_one(*case).items() if p}
        seen = Counter(tuple(counts[part]) for counts in draws)
        assert sum(expected.values()) == pytest.approx(1)
        assert seen.keys() == expected.keys()
        for counts, p in expected.items():  # within 4.5 standard deviations
            assert abs(seen[counts] / trials - p) < 4.5 * np.sqrt(p * (1 - p) / trials)


def test_pachinko_gives_participants_few_coarse_labels_and_all_their_labels(
    rng: np.random.Generator,
) -> None:
    labels = rng.permutation(np.arange(50_000) % 100)
    coarse = labels * 7 % 20  # siblings are not neighbours
    parts = partition_pachinko(labels, coarse, 500)
    assert {len(held) for held in parts} == {100}
    fine_counts = label_counts(parts, labels)
    coarse_counts = label_counts(parts, coarse)
    # Dir(0.1) over 20 coarse labels: a participant's sum of squared frequencies is 1.1 / 3 in the
    # mean, to which the drawing of 100 adds 1 / 100 of the rest; Dir(10) over 5: 11 / 51.
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
    held = (counts.reshape(20, 20, 5) > 0).sum(axis=2)
    assert held.mean() < 1.6
    assert (held[:10] > 0).all()  # before coarse labels are used up


def test_shards_are_stretches_of_equal_length_of_the_sorted_examples(
    rng: np.random.Generator,
) -> None:
    labels = rng.permutation(np.arange(1200) % 10)  # 40 shards of 30, 4 of each label
    parts = partition_by_shards(labels, 20)
    counts = label_counts(parts, labels)
    assert (counts.sum(axis=1) == 60).all()
    assert set(np.unique(counts)) == {0, 30, 60}
    held = Counter((counts > 0).sum(axis=1).tolist())
    assert held.keys() == {1, 2} and held[2] > held[1]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 40))
def test_shards_that_do_not_divide_differ_by_one(participants: int, shards: int, more: int) -> None:
    labels = np.arange(participants * shards + more)
    parts = partition_by_shards(labels, participants, shards_per_participant=shards)
    length = len(labels) // (participants * shards)
    for held in parts:
        assert shards * length <= len(held) <= shards * (length + 1)
        assert np.count_nonzero(np.diff(held) > 1) < shards


def test_quantities_are_distributed_as_said() -> None:
    sizes = [len(held) for held in partition_by_quantity(400_000, 2000, sigma=1.5)]
    assert np.std(np.log(sizes)) == pytest.approx(1.5, rel=0.05)
    sizes = [len(held) for held in partition_by_quantity(400_000, 2000, alpha=0.5)]
    # Of Dir(0.5) over many the coefficient of variation is the root of 1 / 0.5.
    assert np.std(sizes) / np.mean(sizes) == pytest.approx(np.sqrt(2), rel=0.1)


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


def test_by_field_gives_each_group_to_whoever_has_least(rng: np.random.Generator) -> None:
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
    for held, name in zip(parts, names, strict=True):
        assert {values[index] for index in held} == {name}


def test_natural_sorts_the_participants_by_name(rng: np.random.Generator) -> None:
    labels = rng.permutation(np.arange(200) % 30 - 10)
    parts, names = partition_natural([{"label": label} for label in labels], "label")
    assert names == list(range(-10, 20))
    assert [held.tolist() for held in parts] == [
        np.flatnonzero(labels == k).tolist() for k in names
    ]


@pytest.mark.parametrize("value", [np.zeros(3), np.zeros((0, 2))])
def test_a_field_of_arrays_names_nobody(value: NDArray[Any]) -> None:
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
        ([[0], [1.5], [2]], "islands 1 is float64"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(partition: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_partition([np.array(part) for part in partition], 3, 5, "islands")


@pytest.mark.parametrize("participants", [0, -2])
def test_no_participants_are_refused(participants: int) -> None:
    with pytest.raises(ValueError, match=f"at least one participant, not {participants}"):
        partition_iid(5, participants)


ALPHA = "but must be above 0 and finite"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: partition_dirichlet([0, 1], 1, alpha=0), f"alpha is 0, {ALPHA}"),
        (lambda: partition_dirichlet([0, 1], 1, alpha=-1.0), "the smaller, the more participants"),
        (lambda: partition_dirichlet([0, 1], 1, alpha=np.nan), f"alpha is nan, {ALPHA}"),
        (lambda: partition_dirichlet([0, 1], 1, alpha=np.inf), f"alpha is inf, {ALPHA}"),
        (lambda: partition_dirichlet([0, 1], 3, alpha=1), "use 2 participants or fewer"),
        (lambda: partition_dirichlet([0, 1], 0, alpha=1), "at least one participant, not 0"),
        (
            lambda: partition_dirichlet(np.arange(9), 4, alpha=1, min_examples=3),
            "must have at least 3: use 3 participants or fewer",
        ),
        (
            lambda: partition_dirichlet([0, 1], 1, alpha=1, min_examples=0),
            "min_examples is 0, but every participant must have at least 1",
        ),
        (
            lambda: partition_dirichlet(np.eye(3, dtype=int), 1, alpha=1),
            r"labels must be one integer for each example.*\(3, 3\).*argmax",
        ),
        (lambda: partition_dirichlet(["a", "b"], 1, alpha=1), "number names by np.unique"),
        (lambda: partition_dirichlet([0.0, 1.0], 1, alpha=1), "but are float64"),
        (lambda: partition_pachinko([0, 1], ["x", "y"], 1), "coarse_labels must be one integer"),
        (lambda: partition_pachinko([0, 1], [0], 1), "2 labels and 1 coarse labels: give both"),
        (
            lambda: partition_pachinko([4, 5, 4], [2, 1, 9], 1),
            "Label 4 has the coarse labels 2 and 9.*number labels .* differently",
        ),
        (lambda: partition_pachinko([0, 1], [0, 0], 3), "use 2 participants or fewer"),
        (lambda: partition_pachinko([0, 1], [0, 0], 1, alpha=0), f"alpha is 0, {ALPHA}"),
        (lambda: partition_pachinko([0, 1], [0, 0], 1, beta=-2), f"beta is -2, {ALPHA}"),
        (lambda: partition_by_shards([0, 1, 2], 2), "at least 2: use 1 participants or fewer"),
        (
            lambda: partition_by_shards([0, 1, 2], 2, shards_per_participant=0),
            "shards_per_participant is 0, but must be at least 1",
        ),
        (lambda: partition_by_quantity(9, 3), "alpha is None and sigma is None.*give alpha"),
        (lambda: partition_by_quantity(9, 3, alpha=1, sigma=2), "alpha is 1 and sigma is 2"),
        (lambda: partition_by_quantity(9, 3, sigma=0), "the larger, the more amounts differ"),
        (lambda: partition_by_quantity(9, 3, alpha=0), "the smaller, the more amounts differ"),
        (lambda: partition_by_quantity(9, 10, alpha=1), "use 9 participants or fewer"),
        (lambda: partition_natural([], "x"), "0 values of the field 'x' cannot be shared"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Sequence[Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
