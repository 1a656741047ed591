"""Partitions whose participants differ in their numbers of examples."""

import numpy as np

from fedpax.errors import ArgumentError
from fedpax.populations.assignment import (
    assign_by_shares,
    check_positive,
    frozen_random,
    log_gamma,
    to_partition,
    top_up,
)
from fedpax.populations.partition import check_count
from fedpax.populations.ragged_partition import RaggedPartition


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
        alpha: the concentration of the Dirichlet distribution, above 0; the smaller it is, the more
            sizes differ. Default None: use `sigma`.
        sigma: the spread of the log-normal distribution, above 0; the larger it is, the more sizes
            differ. Default None: use `alpha`.
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
        Li et al. Federated Learning on Non-IID Data Silos: An Experimental Study.
        arXiv:2102.02079, "quantity skew".
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
