"""Shared steps of the random partitions."""

import numpy as np
from jaxtyping import Float64, Int64

from fedpax.errors import ArgumentError
from fedpax.populations.client_arrays import RaggedPartition
from fedpax.primitives.casts import real_number
from fedpax.sources.shuffle import hash_key


def check_positive(name: str, value: float, meaning: str) -> float:
    """Return a parameter of a distribution, which must be positive and finite, as a float."""
    number = real_number(name, value)
    # Beyond these bounds the logarithms of random numbers overflow.
    if not 1e-290 < number < 1e290:
        raise ArgumentError(
            f"{name} is {value}, expected a positive, finite number (1e-290 to 1e290): {meaning}."
        )
    return number


def frozen_random(seed: int) -> np.random.RandomState:
    """Make a generator whose numbers NumPy promises never to change, unlike a `Generator`'s."""
    return np.random.RandomState(np.random.Philox(key=int(hash_key(seed))))


def even_sizes(total: int, parts: int) -> Int64[np.ndarray, " parts"]:
    """Return the sizes of parts that differ by at most one."""
    return total // parts + (np.arange(parts) < total % parts)


def log_gamma(
    random: np.random.RandomState, shape: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """Draw the logarithms of gamma variates; normalized variates are Dirichlet distributed."""
    # With a small shape variates underflow, but a Gamma(a) variate equals a Gamma(a + 1) variate
    # times the power 1 / a of a uniform one, and their logarithms do not.
    powers = random.standard_exponential(shape.shape) / shape
    return np.log(random.standard_gamma(shape + 1)) - powers


def assign_by_shares(
    random: np.random.RandomState,
    num_examples: int,
    log_shares: Float64[np.ndarray, " participants"],
) -> Int64[np.ndarray, " examples"]:
    """Assign examples to participants in given shares, rounded up or down."""
    # Systematic sampling, evenly spaced points with a random offset, meets shares below one example
    # in expectation, and by different participants for each label.
    ends = np.cumsum(np.exp(log_shares - log_shares.max()))
    points = (np.arange(num_examples) + random.random_sample()) / num_examples
    return np.searchsorted(ends / ends[-1], points)


def top_up(owner: Int64[np.ndarray, " examples"], num_participants: int, min_examples: int) -> None:
    """Move examples, in place, to participants with fewer than `min_examples`."""
    # Equivalent to moving one example at a time from the participant that has most at that moment.
    sizes = np.bincount(owner, minlength=num_participants)
    missing = np.maximum(min_examples - sizes, 0)
    if not missing.any():
        return
    # Moving one at a time would take each participant's examples with the highest numbers.
    order = sort_positions(owner, num_participants)
    number = np.empty_like(owner)
    number[order] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = sort_positions(number.max() - number, int(number.max()) + 1)[: missing.sum()]
    owner[moved] = np.repeat(np.arange(num_participants), missing)


def sort_positions(keys: Int64[np.ndarray, " n"], limit: int) -> Int64[np.ndarray, " n"]:
    """Return the positions of integers from 0 to `limit - 1` in ascending order, ties in order."""
    # Sorting integers that hold key and position takes a fifth of the time of a stable argsort.
    bits = max(len(keys) - 1, 1).bit_length()
    if limit.bit_length() + bits > 63:
        return np.argsort(keys, kind="stable")
    packed = (keys.astype(np.int64) << bits) | np.arange(len(keys))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def to_partition(
    order: Int64[np.ndarray, " examples"],
    owner: Int64[np.ndarray, " examples"],
    num_participants: int,
) -> RaggedPartition:
    """Make a partition from the participant of each example of a shuffled order."""
    owner_of_example = np.empty_like(owner)
    owner_of_example[order] = owner
    starts = np.zeros(num_participants + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=num_participants), out=starts[1:])
    return RaggedPartition(sort_positions(owner_of_example, num_participants), starts)
