"""Partitions that make participants differ: in their labels, or in how much they have.

Each gives every example to just one participant, every participant at least one, and depends on
its arguments alone: random numbers come from ``numpy.random.RandomState``, which NumPy has frozen,
over the bits of Philox, which NumPy keeps too. (The streams of ``numpy.random.Generator`` may
change with NumPy.)
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.data.populations.partition import check_count, number_labels
from fedpax.data.shuffle import fold


def partition_dirichlet(
    labels: ArrayLike,
    participants: int,
    *,
    alpha: float,
    equal_sizes: bool = False,
    min_examples: int = 1,
    seed: int = 0,
) -> list[NDArray[np.int64]]:
    """Gives participants different labels, by Dirichlet distributions.

    By default each label's examples are divided in shares drawn from Dir(alpha, ..., alpha) over
    the participants, so that their numbers of examples differ too (Li et al.). A participant that
    gets fewer than ``min_examples`` is given random ones, taken one by one from whoever has most.

    With ``equal_sizes`` each participant in turn draws its distribution over the labels from
    Dir(alpha * classes * prior), and then its examples, without replacement; a label of which none
    is left is left out (Hsu et al., whose own alpha is this one times the number of classes). The
    prior is the distribution of the labels that are left, where theirs is that of the whole, so
    that the last participants, who must take what is left, differ little from the first.

    Either way ``alpha`` counts for each label: with 0.1 most participants have few labels, with
    1 every mixture of equally frequent labels is equally likely, and with 100 all are much alike.
    Dividing labels in shares, a large alpha makes participants even more alike than random
    samples are.

    Args:
        labels: integers [examples], as ``read_examples(source)["label"]``.
        participants: how many participants share the examples.
        alpha: the concentration, above 0; the smaller, the more participants differ.
        equal_sizes: whether numbers of examples differ by at most one.
        min_examples: how many examples each participant has at least.
        seed: chooses the partition.

    Returns:
        For each participant sorted indices, int64.

    Raises:
        ValueError: if the labels are not integers [examples], ``alpha`` is not positive, or there
            are too few examples.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> parts = partition_dirichlet(labels, 4, alpha=0.1)
        >>> sum(len(indices) for indices in parts)
        1000
        >>> parts = partition_dirichlet(labels, 4, alpha=0.1, equal_sizes=True)
        >>> [len(indices) for indices in parts]
        [250, 250, 250, 250]

    Reference:
        Li et al. Federated Learning on Non-IID Data Silos: An Experimental Study.
        arXiv:2102.02079, "distribution-based label imbalance". Hsu et al. Measuring the Effects
        of Non-Identical Data Distribution for Federated Visual Classification.
        arXiv:1909.06335, section 3.
    """
    _, classes = number_labels(labels)
    check_count(len(classes), "examples", participants, min_examples)
    _check_positive("alpha", alpha, "the smaller, the more participants differ")
    random = _random(seed)
    order = random.permutation(len(classes))
    members = _members(classes[order])
    holder = np.empty_like(order)
    if equal_sizes:
        left = np.array([len(places) for places in members])
        counts = np.empty((participants, len(left)), np.int64)
        for k, size in enumerate(_even(len(order), participants)):
            prior = np.maximum(left, 1) / left.sum()  # no gamma variate has the shape 0
            log_weights = _log_gamma(random, alpha * len(left) * prior)
            counts[k] = _draw(random, np.array([size]), log_weights, np.array([0]), left)
            left -= counts[k]
        _hand_out(holder, members, counts)
    else:
        for places in members:
            log_shares = _log_gamma(random, np.full(participants, alpha))
            holder[places] = _deal(random, len(places), log_shares)
        _top_up(holder, participants, min_examples)
    return _parts(order, holder, participants)


def partition_pachinko(
    labels: ArrayLike,
    coarse_labels: ArrayLike,
    participants: int,
    *,
    alpha: float = 0.1,
    beta: float = 10.0,
    seed: int = 0,
) -> list[NDArray[np.int64]]:
    """Gives participants different groups of labels, as CIFAR-100's in federated research.

    Each participant in turn draws a distribution over the coarse labels from Dir(alpha, ...,
    alpha), and for each of them one over its labels from Dir(beta, ..., beta). For each of its
    examples it then draws a coarse label, and one of that one's labels; the example is a random
    one that nobody has yet. Labels of which none is left are left out. All participants have
    equally many, to within one; the last must take what is left.

    The defaults, with 500 participants, are those of the reference. Its own partition, which
    others have trained on, cannot be drawn again: load it instead where numbers are compared.

    Args:
        labels: integers [examples].
        coarse_labels: integers [examples], the same for all examples of a label.
        participants: how many participants share the examples.
        alpha: the concentration of coarse labels, above 0.
        beta: the concentration of labels under a coarse label, above 0.
        seed: chooses the partition.

    Returns:
        For each participant sorted indices, int64.

    Raises:
        ValueError: if labels are not integers [examples], a label has several coarse labels,
            ``alpha`` or ``beta`` is not positive, or there are too few examples.

    Example:
        >>> labels = np.arange(1000) % 100
        >>> parts = partition_pachinko(labels, labels // 5, 10)
        >>> [len(indices) for indices in parts] == [100] * 10
        True

    Reference:
        Reddi et al. Adaptive Federated Optimization. arXiv:2003.00295, the appendix on a
        federated CIFAR-100; after Li, McCallum. Pachinko Allocation. ICML 2006.
    """
    (_, fine), (_, coarse) = number_labels(labels), number_labels(coarse_labels, "coarse_labels")
    if len(fine) != len(coarse):
        raise ValueError(
            f"There are {len(fine)} labels and {len(coarse)} coarse labels: give both for each "
            "example."
        )
    check_count(len(fine), "examples", participants)
    for name, value in ("alpha", alpha), ("beta", beta):
        _check_positive(name, value, "the smaller, the more participants differ")
    parent = np.empty(fine.max() + 1, np.int64)
    parent[fine] = coarse
    if (strays := np.flatnonzero(parent[fine] != coarse)).size:
        label = np.asarray(labels)[strays[0]]
        both = np.unique(np.asarray(coarse_labels)[fine == fine[strays[0]]])
        raise ValueError(
            f"Label {label} has the coarse labels {both[0]} and {both[1]}, but must have one: "
            "number labels under different coarse labels differently."
        )
    # Labels numbered anew, so that those under a coarse label follow each other.
    _, fine = number_labels(coarse * len(parent) + fine)
    begins = np.flatnonzero(np.diff(np.sort(parent), prepend=-1))  # [coarse labels]
    random = _random(seed)
    order = random.permutation(len(fine))
    members = _members(fine[order])
    left = np.array([len(places) for places in members])
    counts = np.empty((participants, len(left)), np.int64)
    for k, size in enumerate(_even(len(order), participants)):
        log_weights = _log_gamma(random, np.full(len(begins), alpha))
        coarse_left = np.add.reduceat(left, begins)
        numbers = _draw(random, np.array([size]), log_weights, np.array([0]), coarse_left)
        log_weights = _log_gamma(random, np.full(len(left), beta))
        counts[k] = _draw(random, numbers, log_weights, begins, left)
        left -= counts[k]
    holder = np.empty_like(order)
    _hand_out(holder, members, counts)
    return _parts(order, holder, participants)


def partition_by_shards(
    labels: ArrayLike, participants: int, *, shards_per_participant: int = 2, seed: int = 0
) -> list[NDArray[np.int64]]:
    """Sorts the examples by label, cuts them into equal shards, and deals the shards out.

    Most participants have at most ``shards_per_participant`` labels, and all have equally many
    examples, to within one a shard.

    Args:
        labels: integers [examples].
        participants: how many participants share the examples.
        shards_per_participant: how many shards each has; the reference takes 2.
        seed: chooses who has which shards, and the order of the examples of a label.

    Returns:
        For each participant sorted indices, int64.

    Raises:
        ValueError: if the labels are not integers [examples], or there are fewer examples than
            shards.

    Example:
        >>> parts = partition_by_shards([0, 0, 1, 1, 2, 2, 3, 3], 2, shards_per_participant=2)
        >>> [len(indices) for indices in parts]
        [4, 4]

    Reference:
        McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized
        Data. arXiv:1602.05629, section 3.
    """
    _, classes = number_labels(labels)
    if shards_per_participant < 1:
        raise ValueError(
            f"shards_per_participant is {shards_per_participant}, but must be at least 1."
        )
    check_count(len(classes), "examples", participants, shards_per_participant)
    random = _random(seed)
    order = random.permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    shards = participants * shards_per_participant
    dealt = random.permutation(shards) // shards_per_participant
    holder = np.repeat(dealt, _even(len(order), shards))
    return _parts(order, holder, participants)


def partition_by_quantity(
    examples: int,
    participants: int,
    *,
    alpha: float | None = None,
    sigma: float | None = None,
    min_examples: int = 1,
    seed: int = 0,
) -> list[NDArray[np.int64]]:
    """Gives participants different amounts of shuffled examples.

    The participants' shares are drawn from Dir(alpha, ..., alpha) or, before they are divided by
    their sum, from a log-normal distribution, whose logarithm has the standard deviation
    ``sigma``. A participant that gets fewer than ``min_examples`` is given others, taken one by
    one from whoever has most.

    Args:
        examples: how many examples there are.
        participants: how many participants share them.
        alpha: the concentration of a Dirichlet distribution, above 0; the smaller, the more
            amounts differ.
        sigma: the spread of a log-normal distribution, above 0; the larger, the more amounts
            differ.
        min_examples: how many examples each participant has at least.
        seed: chooses the partition.

    Returns:
        For each participant sorted indices, int64.

    Raises:
        ValueError: if not just one of ``alpha`` and ``sigma`` is given, it is not positive, or
            there are too few examples.

    Example:
        >>> parts = partition_by_quantity(1000, 4, sigma=1.0)
        >>> sum(len(indices) for indices in parts)
        1000

    Reference:
        Li et al. Federated Learning on Non-IID Data Silos: An Experimental Study.
        arXiv:2102.02079, "quantity skew".
    """
    check_count(examples, "examples", participants, min_examples)
    random = _random(seed)
    order = random.permutation(examples)
    if alpha is not None and sigma is None:
        _check_positive("alpha", alpha, "the smaller, the more amounts differ")
        log_shares = _log_gamma(random, np.full(participants, alpha))
    elif sigma is not None and alpha is None:
        _check_positive("sigma", sigma, "the larger, the more amounts differ")
        log_shares = sigma * random.standard_normal(participants)
    else:
        raise ValueError(
            f"alpha is {alpha} and sigma is {sigma}, but just one says how amounts differ: give "
            "alpha for a Dirichlet distribution or sigma for a log-normal one."
        )
    holder = _deal(random, examples, log_shares)
    _top_up(holder, participants, min_examples)
    return _parts(order, holder, participants)


def _check_positive(name: str, value: float, meaning: str) -> None:
    # Beyond these bounds the logarithms of random numbers overflow.
    if not 1e-290 < value < 1e290:
        raise ValueError(
            f"{name} is {value}, but must be above 0 and finite (1e-290 to 1e290): {meaning}."
        )


def _random(seed: int) -> np.random.RandomState:
    """A generator of random numbers that NumPy promises never to change."""
    return np.random.RandomState(np.random.Philox(key=int(fold(seed))))


def _even(number: int, parts: int) -> NDArray[np.int64]:
    """The sizes of parts that differ by at most one."""
    return number // parts + (np.arange(parts) < number % parts)


def _members(classes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """For each class its places in an array of classes."""
    return np.split(np.argsort(classes, kind="stable"), np.cumsum(np.bincount(classes))[:-1])


def _log_gamma(random: np.random.RandomState, shape: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithms of gamma variates; divided by their sum, the variates are Dirichlet's.

    With a small shape nearly all variates are below the smallest float, but a Gamma(a) variate is
    one of Gamma(a + 1) times the power 1 / a of a uniform one, whose logarithms are not.
    """
    powers = random.standard_exponential(shape.shape) / shape
    return np.log(random.standard_gamma(shape + 1)) - powers


def _draw(
    random: np.random.RandomState,
    numbers: NDArray[np.int64],
    log_weights: NDArray[np.float64],
    begins: NDArray[np.int64],
    left: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Draws ``numbers`` [groups] of labels from groups of labels; returns each label's count.

    The labels of a group follow each other; ``begins`` [groups] says where. They are drawn by
    their weights [labels], none more often than it is left [labels]: what exceeds the supply is
    drawn again among the others of the group, which comes to the same as drawing one by one and
    leaving each label out as soon as none is left.
    """
    ends = np.append(begins[1:], len(left))
    counts = np.zeros_like(left)
    while numbers.any():
        logs = np.where(counts < left, log_weights, -np.inf)
        # A group's weights are divided by their greatest, which is 0 where nothing is left.
        greatest = np.maximum(np.maximum.reduceat(logs, begins), np.finfo(np.float64).min)
        weights = np.exp(logs - np.repeat(greatest, ends - begins))
        sums = np.cumsum(weights)
        low, high = (sums - weights)[begins], sums[ends - 1]
        group = np.repeat(np.arange(len(begins)), numbers)
        points = low[group] + random.random_sample(len(group)) * (high - low)[group]
        found = np.searchsorted(sums, points, side="right")
        found = np.clip(found, begins[group], ends[group] - 1)  # where sums were rounded
        drawn = np.bincount(found, minlength=len(left))
        kept = np.minimum(drawn, left - counts)
        counts += kept
        numbers = np.add.reduceat(drawn - kept, begins)
    return counts


def _deal(
    random: np.random.RandomState, number: int, log_shares: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Deals examples out in shares: who holds each, so that all have their share to within one.

    The places are evenly spaced but begin at random, so that shares below one example are met on
    average, and by other participants for each label.
    """
    ends = np.cumsum(np.exp(log_shares - log_shares.max()))
    places = (np.arange(number) + random.random_sample()) / number
    return np.searchsorted(ends / ends[-1], places)


def _hand_out(
    holder: NDArray[np.int64], members: list[NDArray[np.int64]], counts: NDArray[np.int64]
) -> None:
    """Gives participants their counts [participants, classes] of each class's examples."""
    for places, numbers in zip(members, counts.T, strict=True):
        holder[places] = np.repeat(np.arange(len(counts)), numbers)


def _top_up(holder: NDArray[np.int64], participants: int, least: int) -> None:
    """Gives to those who have fewer than ``least``, one by one from whoever has most."""
    sizes = np.bincount(holder, minlength=participants)
    short = np.maximum(least - sizes, 0)
    if not short.any():
        return
    # With a participant's examples numbered, those with the highest numbers are the ones that
    # would be taken one by one.
    number = np.empty_like(holder)
    begins = np.cumsum(sizes) - sizes
    number[np.argsort(holder, kind="stable")] = np.arange(len(holder)) - np.repeat(begins, sizes)
    taken = np.argsort(-number, kind="stable")[: short.sum()]
    holder[taken] = np.repeat(np.arange(participants), short)


def _parts(
    order: NDArray[np.int64], holder: NDArray[np.int64], participants: int
) -> list[NDArray[np.int64]]:
    """Makes a partition of who holds each example of a shuffled order."""
    holder_of = np.empty_like(holder)
    holder_of[order] = holder
    ends = np.cumsum(np.bincount(holder, minlength=participants))
    return np.split(np.argsort(holder_of, kind="stable"), ends[:-1])
