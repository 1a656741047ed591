"""Partitions whose participants differ in their labels, or in their numbers of examples."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from fedpax.checks import check_integers
from fedpax.errors import ArgumentError
from fedpax.populations.assignment import (
    assign_by_shares,
    check_positive,
    even_sizes,
    frozen_random,
    log_gamma,
    sort_positions,
    to_partition,
    top_up,
)
from fedpax.populations.client_arrays import RaggedPartition
from fedpax.populations.partition import check_count, index_labels

MOST_IN_TURN = 8192
"""The number of participants up to which each one draws alone."""

_Counts: TypeAlias = Int64[np.ndarray, "..."]


def partition_dirichlet(
    labels: ArrayLike | Iterable[int],
    num_participants: int,
    *,
    alpha: float,
    equal_sizes: bool = False,
    min_examples: int = 1,
    seed: int = 0,
) -> RaggedPartition:
    """Partition examples with Dirichlet-distributed label skew.

    By default (Li et al.), the examples of each label are divided in shares drawn from
    Dirichlet(alpha, ..., alpha) over the participants, so sizes differ too. A participant with
    fewer than `min_examples` gets random examples, one at a time from the participant with most.

    With `equal_sizes` (Hsu et al.), one participant after another draws a label distribution from
    Dirichlet(alpha * C * prior), C the number of labels, and then its examples without replacement.
    Differences from Hsu et al.:

    - Their alpha is `alpha * C`.
    - Their prior is the label distribution of all examples, here of the unassigned ones, so that
      the last participants have a similar skew as the first.

    `alpha` is the concentration per label: with 0.1 most participants have few labels, with 1 every
    mixture of equally frequent labels is equally likely, and with 100 all are alike.

    Args:
        labels: integers `[examples]`, such as `source.column("label")`.
        num_participants: the number of participants.
        alpha: the concentration, above 0.
        equal_sizes: whether the participants' numbers of examples differ by at most one.
        min_examples: the smallest number of examples per participant.
        seed: the random seed.

    Returns:
        For each participant the sorted indices of its examples, int64.

    Raises:
        ValueError: `labels` is not integers `[examples]`, `alpha` is not positive, or there are too
            few examples.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> parts = partition_dirichlet(labels, 4, alpha=0.1)
        >>> sum(len(indices) for indices in parts)
        1000

    Reference:
        Li et al., arXiv:2102.02079, "distribution-based label imbalance"; Hsu et al.,
        arXiv:1909.06335, section 3.
    """
    _, class_index = index_labels(labels)
    check_count(len(class_index), "examples", num_participants, min_examples)
    alpha = check_positive("alpha", alpha, "the smaller it is, the more participants differ")
    random = frozen_random(seed)
    order = random.permutation(len(class_index))
    if equal_sizes:

        def draw(sizes: _Counts, remaining: _Counts) -> _Counts:
            prior = (
                np.maximum(remaining, 1) / remaining.sum()
            )  # gamma variates need a shape above 0
            shape = np.broadcast_to(alpha * len(prior) * prior, (len(sizes), len(prior)))
            log_weights = log_gamma(random, shape)
            return draw_labels(random, sizes, log_weights, np.array([0]), remaining)

        owner = _assign_in_turn(class_index[order], num_participants, draw)
    else:
        owner = np.empty_like(order)
        positions = sort_positions(class_index[order], len(class_index))
        for p in np.split(positions, np.cumsum(np.bincount(class_index))[:-1]):
            log_shares = log_gamma(random, np.full(num_participants, alpha))
            owner[p] = assign_by_shares(random, len(p), log_shares)
        top_up(owner, num_participants, min_examples)
    return to_partition(order, owner, num_participants)


def partition_pachinko(
    labels: ArrayLike | Iterable[int],
    coarse_labels: ArrayLike | Iterable[int],
    num_participants: int,
    *,
    alpha: float = 0.1,
    beta: float = 10.0,
    seed: int = 0,
) -> RaggedPartition:
    """Partition examples by Pachinko allocation over two levels of labels, as federated CIFAR-100.

    One participant after another draws a distribution over the coarse labels from Dirichlet(alpha,
    ..., alpha), and for each coarse label one over its labels from Dirichlet(beta, ..., beta). Each
    of its examples is drawn by coarse label, then label, among the unassigned ones. Sizes differ by
    at most one; the last participants get all that is left.

    The reference's own partition, which is not reproducible, is in `federated_cifar100`.

    Args:
        labels: integers `[examples]`.
        coarse_labels: integers `[examples]`, equal for all examples of a label.
        num_participants: the number of participants.
        alpha: the concentration of coarse labels, above 0.
        beta: the concentration of labels under a coarse label, above 0.
        seed: the random seed.

    Returns:
        For each participant the sorted indices of its examples, int64.

    Raises:
        ValueError: `labels` or `coarse_labels` is not integers `[examples]`, a label has several
            coarse labels, `alpha` or `beta` is not positive, or there are too few examples.

    Example:
        >>> labels = np.arange(1000) % 100
        >>> parts = partition_pachinko(labels, labels // 5, 10)
        >>> [len(indices) for indices in parts] == [100] * 10
        True

    Reference:
        Reddi et al., arXiv:2003.00295, appendix; after Li, McCallum, ICML 2006.
    """
    (_, fine), (_, coarse) = index_labels(labels), index_labels(coarse_labels, "coarse_labels")
    if len(fine) != len(coarse):
        raise ArgumentError(
            f"There are {len(fine)} labels and {len(coarse)} coarse labels: give one of each for "
            "every example."
        )
    check_count(len(fine), "examples", num_participants)
    alpha = check_positive("alpha", alpha, "the smaller it is, the more participants differ")
    beta = check_positive("beta", beta, "the smaller it is, the more participants differ")
    parent = np.empty(fine.max() + 1, np.int64)
    parent[fine] = coarse
    if (conflicts := np.flatnonzero(parent[fine] != coarse)).size:
        label = np.asarray(labels)[conflicts[0]]
        both = np.unique(np.asarray(coarse_labels)[fine == fine[conflicts[0]]])
        raise ArgumentError(
            f"Label {label} has the coarse labels {both[0]} and {both[1]}, expected one: use "
            "different labels under different coarse labels."
        )
    # Make the labels of a coarse label contiguous.
    _, fine = index_labels(coarse * len(parent) + fine)
    starts = np.flatnonzero(np.diff(np.sort(parent), prepend=-1))  # [coarse labels]
    random = frozen_random(seed)
    order = random.permutation(len(fine))

    def draw(sizes: _Counts, remaining: _Counts) -> _Counts:
        log_weights = log_gamma(random, np.full((len(sizes), len(starts)), alpha))
        coarse_remaining = np.add.reduceat(remaining, starts)
        coarse_counts = draw_labels(random, sizes, log_weights, np.array([0]), coarse_remaining)
        log_weights = log_gamma(random, np.full((len(sizes), len(remaining)), beta))
        return draw_labels(random, coarse_counts, log_weights, starts, remaining)

    owner = _assign_in_turn(fine[order], num_participants, draw)
    return to_partition(order, owner, num_participants)


def partition_by_shards(
    labels: ArrayLike | Iterable[int],
    num_participants: int,
    *,
    shards_per_participant: int = 2,
    seed: int = 0,
) -> RaggedPartition:
    """Sort examples by label, split them into equal shards, and assign the shards at random.

    Args:
        labels: integers `[examples]`.
        num_participants: the number of participants.
        shards_per_participant: the number of shards per participant. Default 2, the paper's.
        seed: the random seed.

    Returns:
        For each participant the sorted indices of its examples, int64.

    Raises:
        ValueError: `labels` is not integers `[examples]`, or there are fewer examples than shards.

    Example:
        >>> parts = partition_by_shards([0, 0, 1, 1, 2, 2, 3, 3], 2, shards_per_participant=2)
        >>> [len(indices) for indices in parts]
        [4, 4]

    Reference:
        McMahan et al. arXiv:1602.05629, section 3.
    """
    _, class_index = index_labels(labels)
    check_integers(shards_per_participant=shards_per_participant)
    if shards_per_participant < 1:
        raise ArgumentError(
            f"shards_per_participant is {shards_per_participant}, expected at least 1."
        )
    check_count(len(class_index), "examples", num_participants, shards_per_participant)
    random = frozen_random(seed)
    order = random.permutation(len(class_index))
    order = order[np.argsort(class_index[order], kind="stable")]
    num_shards = num_participants * shards_per_participant
    shard_owner = random.permutation(num_shards) // shards_per_participant
    owner = np.repeat(shard_owner, even_sizes(len(order), num_shards))
    return to_partition(order, owner, num_participants)


def draw_labels(
    random: np.random.RandomState,
    group_counts: Int64[np.ndarray, "*participants groups"],
    log_weights: Float64[np.ndarray, "*participants labels"],
    starts: Int64[np.ndarray, " groups"],
    remaining: Int64[np.ndarray, " labels"],
) -> Int64[np.ndarray, "*participants labels"]:
    """Draw labels from groups of labels by weight, each at most as often as it has examples."""
    # Draws beyond a label's remaining examples are repeated among the other labels of its group,
    # which is as if labels were drawn one at a time and removed when used up. Of several
    # participants, the first ones keep their draws.
    number, shape = len(remaining), log_weights.shape
    log_weights = log_weights.reshape(-1, number)
    group_counts = group_counts.reshape(len(log_weights), len(starts))
    # The groups of all participants, as positions in the flat weights.
    first = np.arange(len(log_weights))[:, None] * number
    group_starts = (first + starts).ravel()
    group_ends = (first + np.append(starts[1:], number)).ravel()
    counts = np.zeros(log_weights.shape, np.int64)
    while group_counts.any():
        left = remaining - counts.sum(axis=0)
        logs = np.where(left > 0, log_weights, -np.inf).ravel()
        # Divide a group's weights by the largest, which is 0 if the whole group is used up.
        largest = np.maximum(np.maximum.reduceat(logs, group_starts), np.finfo(np.float64).min)
        weights = np.exp(logs - np.repeat(largest, group_ends - group_starts))
        sums = np.cumsum(weights)
        low, high = (sums - weights)[group_starts], sums[group_ends - 1]
        group = np.repeat(np.arange(len(group_starts)), group_counts.ravel())
        points = low[group] + random.random_sample(len(group)) * (high - low)[group]
        labels = np.searchsorted(sums, points, side="right")
        # Against rounding of the sums.
        labels = np.clip(labels, group_starts[group], group_ends[group] - 1)
        drawn = np.bincount(labels, minlength=counts.size).reshape(counts.shape)
        kept = np.minimum(np.cumsum(drawn, axis=0), left)
        accepted = np.diff(kept, axis=0, prepend=0)
        counts += accepted
        group_counts = np.add.reduceat(drawn - accepted, starts, axis=1)
    return counts.reshape(shape)


def _assign_in_turn(
    class_index: Int64[np.ndarray, " examples"],
    num_participants: int,
    draw: Callable[[_Counts, _Counts], _Counts],
) -> Int64[np.ndarray, " examples"]:
    """Return the participant of each example, where participants `draw` one after another."""
    # Many participants draw in blocks of up to 1/256 of those that are left: a block finds nearly
    # the examples that each of its participants would find.
    in_blocks = num_participants > MOST_IN_TURN
    sizes = even_sizes(len(class_index), num_participants)
    by_class = sort_positions(class_index, len(class_index))
    remaining = np.bincount(class_index)
    next_position = np.cumsum(remaining) - remaining
    owner = np.empty(len(class_index), np.int64)
    begin = 0
    while begin < num_participants:
        end = begin + (max(1, (num_participants - begin) // 256) if in_blocks else 1)
        counts = draw(sizes[begin:end], remaining)
        taken = counts.sum(axis=0)
        offset = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
        taken_examples = by_class[np.repeat(next_position, taken) + offset]
        participants = np.tile(np.arange(begin, end), len(taken))
        owner[taken_examples] = np.repeat(participants, counts.T.ravel())
        remaining, next_position, begin = remaining - taken, next_position + taken, end
    return owner


def partition_by_quantity(
    num_examples: int,
    num_participants: int,
    *,
    alpha: float | None = None,
    sigma: float | None = None,
    min_examples: int = 1,
    seed: int = 0,
) -> RaggedPartition:
    """Partition shuffled examples into parts of different sizes.

    The participants' shares are drawn from Dirichlet(alpha, ..., alpha), or from a log-normal
    distribution whose logarithm has the standard deviation `sigma`, and normalized. A participant
    with fewer than `min_examples` gets more, one at a time from the participant with most.

    Args:
        num_examples: the number of examples.
        num_participants: the number of participants.
        alpha: the concentration of the Dirichlet distribution, above 0. Default None: use `sigma`.
        sigma: the spread of the log-normal distribution, above 0. Default None: use `alpha`.
        min_examples: the smallest number of examples per participant.
        seed: the random seed.

    Returns:
        For each participant the sorted indices of its examples, int64.

    Raises:
        ValueError: both or neither of `alpha` and `sigma` are given, the one given is not positive,
            or there are too few examples.

    Example:
        >>> parts = partition_by_quantity(1000, 4, sigma=1.0)
        >>> sum(len(indices) for indices in parts)
        1000

    Reference:
        Li et al. arXiv:2102.02079, "quantity skew".
    """
    check_count(num_examples, "examples", num_participants, min_examples)
    random = frozen_random(seed)
    order = random.permutation(num_examples)
    if alpha is not None and sigma is None:
        alpha = check_positive("alpha", alpha, "the smaller it is, the more sizes differ")
        log_shares = log_gamma(random, np.full(num_participants, alpha))
    elif sigma is not None and alpha is None:
        sigma = check_positive("sigma", sigma, "the larger it is, the more sizes differ")
        log_shares = sigma * random.standard_normal(num_participants)
    else:
        raise ArgumentError(
            f"alpha is {alpha} and sigma is {sigma}, expected exactly one of them: give alpha for "
            "a Dirichlet distribution of sizes, or sigma for a log-normal one."
        )
    owner = assign_by_shares(random, num_examples, log_shares)
    top_up(owner, num_participants, min_examples)
    return to_partition(order, owner, num_participants)
