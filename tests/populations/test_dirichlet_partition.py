"""Partitions by label: Dirichlet, Pachinko and shards."""

import itertools
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpax.data import (
    partition_by_shards,
    partition_dirichlet,
    partition_pachinko,
)
from fedpax.populations import label_skew
from fedpax.populations.assignment import frozen_random
from fedpax.populations.label_skew import draw_labels
from fedpax.populations.partition import Partition, partition_checksum

Labels = NDArray[np.int64]


def label_counts(partition: Partition, labels: Labels) -> Labels:
    """[participants, classes]"""
    return np.array(
        [np.bincount(labels[indices], minlength=labels.max() + 1) for indices in partition]
    )


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


@pytest.mark.parametrize("most_in_turn", [0, 8192])
def test_blocks_of_participants_have_the_distribution_of_one_after_another(
    most_in_turn: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(label_skew, "MOST_IN_TURN", most_in_turn)
    drawn = Mock(wraps=label_skew.draw_labels)
    monkeypatch.setattr(label_skew, "draw_labels", drawn)
    prior = np.array([0.1, 0.2, 0.3, 0.4])
    labels = rng.choice(4, 40_000, p=prior)
    parts = partition_dirichlet(labels, 2000, alpha=0.5, equal_sizes=True)
    assert len(drawn.mock_calls) == 2000 if most_in_turn else len(drawn.mock_calls) < 1000
    assert {len(indices) for indices in parts} == {20}
    assert np.array_equal(np.sort(parts.indices), np.arange(40_000))
    first = label_counts(parts[:1400], labels) / 20
    expected = prior * (1 - prior) * (1 / 3 + (1 - 1 / 3) / 20)
    assert np.abs(first.mean(axis=0) - prior).max() < 0.05
    assert np.abs(first.var(axis=0) / expected - 1).max() < 0.15
    # A label that is used up within a block goes to the first ones: with a small alpha, each
    # participant has one label while there are 20 examples of it.
    labels = rng.permutation(np.arange(40_000) % 4)
    parts = partition_dirichlet(labels, 2000, alpha=1e-6, equal_sizes=True)
    assert ((label_counts(parts, labels) > 0).sum(axis=1) == 1).all()


def test_blocks_of_pachinko_use_every_example_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_skew, "MOST_IN_TURN", 0)
    labels = np.repeat(np.arange(20), 300)
    parts = partition_pachinko(labels, labels // 5, 1000, alpha=0.1, beta=10.0)
    assert set(map(len, parts)) == {6}
    assert np.array_equal(np.sort(parts.indices), np.arange(6000))
    coarse = label_counts(parts, labels).reshape(1000, 4, 5).sum(axis=2)
    # All 6 examples have one of 4 coarse labels with probability 4 * E[p**6], p of Dir(0.1).
    expected = 4 * np.prod((0.1 + np.arange(6)) / (0.4 + np.arange(6)))
    assert ((coarse > 0).sum(axis=1)[:500] == 1).mean() == pytest.approx(expected, abs=0.1)


def test_labels_of_several_participants_are_drawn_without_using_one_too_often() -> None:
    random = frozen_random(1)
    remaining, sizes = np.array([3, 0, 40, 2]), np.full(9, 5)
    counts = draw_labels(
        random, sizes, np.log(np.tile([0.6, 0.2, 0.1, 0.1], (9, 1))), np.array([0]), remaining
    )
    assert (counts.sum(axis=1) == 5).all() and counts.sum(axis=0).tolist() == [3, 0, 40, 2]
    assert counts[0, 0] == 3 or counts[:2, 0].sum() == 3  # the first ones find them


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
    collected: dict[tuple[int, ...], float] = {}
    for draws in itertools.product(range(len(left)), repeat=number):
        remaining, probability = list(left), 1.0
        for draw in draws:
            total = sum(w for w, r in zip(weights, remaining, strict=True) if r)
            probability *= weights[draw] / total if remaining[draw] else 0.0
            remaining[draw] -= 1
        counts = tuple(np.subtract(left, remaining).tolist())
        collected[counts] = collected.get(counts, 0.0) + probability
    return collected


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
