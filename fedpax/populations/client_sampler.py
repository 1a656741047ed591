"""The sampler of cohorts."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import ArrayLike

from fedpax.checks import check_integers
from fedpax.console import count_of
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import checked_cast, host_array
from fedpax.sources.shuffle import hash_key, shuffled_index

# Part of the keys, so that the draws are independent of each other.
_UNIFORM, _WEIGHTED, _GAP, _ORDER, _DRAW = 1, 2, 3, 4, 5

MOST_ARRIVALS = 2**17
"""The size of a population up to which weighted draws take a random number for each client."""

_MOST_DRAWS = 8  # as multiples of the cohort


@dataclass(frozen=True, eq=False)
class ClientSampler:
    """Samples clients without replacement: a fixed number of them, or each with a probability.

    A cohort depends on the seed and the round number alone, on any machine.

    With `sampling_probability` q, each available client joins each round with probability q,
    independently (Poisson sampling). If more than `cohort_size` clients join, `sample` raises: the
    epsilon of `fedpax.aggregators.privacy_spent` is not valid with clients left out.
    `poisson_cohort_size` returns a size that is large enough.

    Attributes:
        num_clients: the size of the population; clients are numbered from 0.
        cohort_size: the largest number of clients in a cohort.
        seed: the random seed.
        weights: floats `[num_clients]`, at least 0: clients are drawn one after another in
            proportion to them. Default None: sample uniformly.
        available: a function `round -> booleans [num_clients]`, True for clients that can take part
            in that round; it must depend on the round number alone. Default None: all clients in
            all rounds.
        sampling_probability: the probability q that an available client joins a round, above 0 and
            at most 1. Default None: cohorts of `cohort_size` clients.
        repeats: whether a subclass can draw a client more than once for a round, for
            methods without states of clients.

    Raises:
        TypeError: a size or `seed` is not an integer, or `weights` is not real numbers.
        ValueError: `cohort_size` is below 1 or above `num_clients`; `weights` has another shape, a
            negative or non-finite entry, or fewer than `cohort_size` entries above 0; or
            `sampling_probability` is out of its range, is given with `weights`, or has a mean
            number of clients above `cohort_size`.

    Example:
        >>> sampler = ClientSampler(num_clients=1_000_000, cohort_size=4, seed=1)
        >>> sampler.sample(7).tolist() == sampler.sample(7).tolist() != sampler.sample(8).tolist()
        True

    Reference:
        Efraimidis, Spirakis, Information Processing Letters 97(5), 2006, for weights.
    """

    repeats: ClassVar[bool] = False

    num_clients: int
    cohort_size: int
    seed: int = 0
    weights: ArrayLike | None = None
    available: Callable[[int], ArrayLike] | None = None
    sampling_probability: float | None = None
    _weights: Float64[np.ndarray, " clients"] | None = field(init=False, repr=False, default=None)
    # The sums of the weights up to each client; None: draw by arrivals.
    _cumulative: Float64[np.ndarray, " clients"] | None = field(
        init=False, repr=False, default=None
    )

    def __post_init__(self) -> None:
        """Check the sizes, the probability and the weights."""
        check_integers(num_clients=self.num_clients, cohort_size=self.cohort_size, seed=self.seed)
        if self.cohort_size < 1:
            raise ArgumentError(f"cohort_size is {self.cohort_size}, expected at least 1.")
        if self.cohort_size > self.num_clients:
            raise ArgumentError(
                f"cohort_size is {self.cohort_size}, but the population has "
                f"{count_of(self.num_clients, 'client')} and sampling is without replacement: take "
                f"{self.num_clients} or fewer. In an experiment of fedpax, set --cohort.size."
            )
        if self.sampling_probability is not None:
            self._check_probability(self.sampling_probability)
        if self.weights is None:
            return
        weights = checked_cast(self.weights, np.float64, "weights")
        if weights.shape != (self.num_clients,):
            raise ArgumentError(
                f"weights has shape {list(weights.shape)}, expected one finite number of at least "
                f"0 for each of the {self.num_clients} clients."
            )
        if len(wrong := np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))):
            raise ArgumentError(
                f"weights[{wrong[0]}], of client {wrong[0]}, is {weights[wrong[0]]:g}, expected a "
                "finite number of at least 0. Give a client that is never to be drawn the weight 0."
            )
        if (positive := np.count_nonzero(weights)) < self.cohort_size:
            raise ArgumentError(
                f"Only {positive} clients have a weight above 0, fewer than cohort_size="
                f"{self.cohort_size}: reduce cohort_size, or give more clients a positive weight."
            )
        object.__setattr__(self, "_weights", weights)
        if self.num_clients > max(MOST_ARRIVALS, 8 * self.cohort_size):
            # Divided by the largest weight, since the sum of huge ones would overflow.
            object.__setattr__(self, "_cumulative", np.cumsum(weights / weights.max()))

    def _check_probability(self, probability: float) -> None:
        if self.weights is not None:
            raise ArgumentError(
                "ClientSampler got weights and sampling_probability, expected one of them: weights "
                "are for cohorts of a fixed size, but with sampling_probability every client has "
                "the same probability. Leave weights out."
            )
        remedy = self._larger_cohort(probability)
        if self.cohort_size < (mean := self.num_clients * probability):
            raise ArgumentError(
                f"cohort_size is {self.cohort_size}, but a round has {mean:g} clients on average "
                f"with sampling_probability={probability} and num_clients={self.num_clients}. "
                f"{remedy} Or reduce sampling_probability (--cohort.sampling_probability)."
            )

    def _larger_cohort(self, probability: float) -> str:
        """Return sentences with a `cohort_size` that is large enough, for errors."""
        suggested = poisson_cohort_size(self.num_clients, probability)
        if suggested == self.num_clients:
            sizes = f"cohort_size={suggested}, all clients."
        else:
            # A mesh needs a multiple of its devices, and the population is the limit.
            sizes = (
                f"a cohort_size from {suggested}, which a round in a billion exceeds, to "
                f"{self.num_clients}. On several devices, take a multiple of their number."
            )
        return f"Take {sizes} In an experiment of fedpax, set --cohort.size."

    @property
    def expected_participants(self) -> float:
        """Return the average size of a cohort if all clients are available, for `private_mean`.

        Example:
            >>> ClientSampler(100, 30, sampling_probability=0.125).expected_participants
            12.5
        """
        if self.sampling_probability is None:
            return float(self.cohort_size)
        return self.num_clients * self.sampling_probability

    @property
    def searches(self) -> bool:
        """Return whether a cohort by weight is drawn by searches: of a large population."""
        return self._cumulative is not None

    def sample(self, round_number: int) -> Int64[np.ndarray, " cohort"]:
        """Sample the cohort of a round, counted from 0.

        Returns:
            int64 `[cohort]`: different clients in random order, `cohort_size` of them or all that
            are available; with `sampling_probability` 0 to `cohort_size`.

        Raises:
            TypeError: `round_number` is not an integer.
            ValueError: `round_number` is negative; no client is available, and
                `sampling_probability` is None; `available` does not return booleans
                `[num_clients]`; or with `sampling_probability`, more than `cohort_size` clients
                join the round.
        """
        try:
            round_number = operator.index(round_number)
        except TypeError:
            raise ArgumentTypeError(
                f"sample(): round_number is {round_number!r}, expected an integer from 0."
            ) from None
        if round_number < 0:
            raise ArgumentError(f"sample(): round_number is {round_number}: rounds count from 0.")
        if self.sampling_probability is not None:
            return self._poisson_sample(round_number, self.sampling_probability)
        candidates = self._candidates(round_number)
        if self._weights is not None:
            return self._weighted_sample(round_number, self._weights, candidates)
        size = self.num_clients if candidates is None else np.count_nonzero(candidates)
        key = hash_key(self.seed, _UNIFORM, round_number)
        sampled = shuffled_index(np.arange(min(self.cohort_size, size)), size, key)
        return sampled if candidates is None else np.flatnonzero(candidates)[sampled]

    def _candidates(self, round_number: int) -> Bool[np.ndarray, " population"] | None:
        """Return which clients can be drawn in a round; None: all clients of positive weight."""
        if self.available is None:
            return None
        available = self._available(round_number)
        if self._weights is not None:
            available = available & (self._weights > 0)
        if not available.any():
            client = "one client" if self._weights is None else "one client of positive weight"
            raise ArgumentError(
                f"No client is available in round {round_number}: a round needs at least one. "
                "Raise the fraction of DailyAvailability, or let `available` return True for at "
                f"least {client}."
            )
        return available

    def _available(self, round_number: int) -> Bool[np.ndarray, " population"]:
        """Return which clients are available in a round, checked."""
        assert self.available is not None
        available = host_array(self.available(round_number), f"available({round_number})")
        if available.shape != (self.num_clients,) or available.dtype != np.bool_:
            raise ArgumentError(
                f"available({round_number}) returned {available.dtype}{list(available.shape)}, "
                f"expected one boolean for each of the {self.num_clients} clients."
            )
        return available

    def _poisson_sample(
        self, round_number: int, probability: float
    ) -> Int64[np.ndarray, " cohort"]:
        """Draw each available client with a probability, in time proportional to the draws."""
        # The gaps between the drawn clients are independent and geometric: `P(gap = g) = (1 - q)^g
        # q`.
        mean = self.num_clients * probability
        count = math.ceil(mean + 6 * math.sqrt(mean) + 6)  # almost always enough gaps
        log_miss = math.log1p(-probability) if probability < 1 else -math.inf
        end, parts, first = -1, [], 0
        while end < self.num_clients:
            uniform = _uniform(self.seed, _GAP, round_number, np.arange(first, first + count))
            # Limited before the division, which would overflow for a tiny probability.
            log_uniform = np.maximum(np.log(uniform), self.num_clients * log_miss)
            gaps = (log_uniform / log_miss).astype(np.int64)
            positions = end + np.cumsum(gaps + 1)
            parts.append(positions[positions < self.num_clients])
            end, first = int(positions[-1]), first + count
        sampled = np.concatenate(parts)
        if self.available is not None:
            sampled = sampled[self._available(round_number)[sampled]]
        if len(sampled) > self.cohort_size:
            stddev = math.sqrt(mean * (1 - probability))
            raise ArgumentError(
                f"sample(): {len(sampled)} clients join round {round_number}, but cohort_size is "
                f"{self.cohort_size}. A round of all {self.num_clients} clients with "
                f"sampling_probability={probability} has {mean:g} on average, with standard "
                f"deviation {stddev:.3g}. {self._larger_cohort(probability)} Clients are not left "
                "out, because epsilon would not be valid."
            )
        order = shuffled_index(
            np.arange(len(sampled)), len(sampled), hash_key(self.seed, _ORDER, round_number)
        )
        return sampled[order]

    def _weighted_sample(
        self,
        round_number: int,
        weights: Float64[np.ndarray, " clients"],
        candidates: Bool[np.ndarray, " clients"] | None,
    ) -> Int64[np.ndarray, " cohort"]:
        """Draw clients one after another by weight."""
        # Draws with replacement, without repeated and unavailable clients, have the same
        # distribution. Each takes a search, where arrivals take a random number per client.
        size = self.cohort_size
        if candidates is not None:
            size = min(size, int(np.count_nonzero(candidates)))
        sampled, count = np.zeros(0, np.int64), size + size // 4 + 16
        if self._cumulative is not None:
            for first in range(0, _MOST_DRAWS * count, count):
                uniform = _uniform(self.seed, _DRAW, round_number, np.arange(first, first + count))
                sums = self._cumulative
                drawn = np.searchsorted(sums, uniform * sums[-1], side="right")
                drawn = np.minimum(drawn, np.searchsorted(sums, sums[-1]))  # against rounding
                if candidates is not None:
                    drawn = drawn[candidates[drawn]]
                together = np.concatenate([sampled, drawn])
                _, positions = np.unique(together, return_index=True)
                sampled = together[np.sort(positions)]
                if len(sampled) >= size:
                    return sampled[:size]
        # Few clients have nearly all of the weight: the remaining ones arrive after them.
        is_left = weights > 0 if candidates is None else candidates.copy()
        is_left[sampled] = False
        client_ids = np.flatnonzero(is_left)
        arrived = self._first_arrivals(client_ids, size - len(sampled), round_number)
        return np.concatenate([sampled, client_ids[arrived]])

    def _first_arrivals(
        self, client_ids: Int64[np.ndarray, " candidates"], size: int, round_number: int
    ) -> Int64[np.ndarray, " cohort"]:
        """Return the positions of the first arrivals of Poisson processes with rates w."""
        assert self._weights is not None
        uniform = _uniform(self.seed, _WEIGHTED, round_number, client_ids)
        # The logarithm of the time, since dividing by a tiny weight would overflow.
        log_times = np.log(-np.log(uniform)) - np.log(self._weights[client_ids])
        first = np.argpartition(log_times, size - 1)[:size]
        return first[np.argsort(log_times[first], kind="stable")]


def poisson_cohort_size(num_clients: int, sampling_probability: float) -> int:
    """Return a `cohort_size` for Poisson sampling that one round in a billion exceeds.

    On several devices, round it up to a multiple of their number.

    Raises:
        ValueError: `sampling_probability` is not above 0 and at most 1.

    Example:
        >>> poisson_cohort_size(num_clients=1_000_000, sampling_probability=0.001)
        1196
    """
    check_integers(num_clients=num_clients)
    if not 0 < sampling_probability <= 1:
        raise ArgumentError(
            f"sampling_probability is {sampling_probability}, expected a number above 0 and at "
            "most 1: the expected size of a cohort divided by the number of clients."
        )
    mean = num_clients * sampling_probability
    stddev = math.sqrt(mean * (1 - sampling_probability))
    return min(num_clients, math.ceil(mean + 6 * stddev + 6))


def _uniform(*numbers: ArrayLike) -> Float64[np.ndarray, " draws"]:
    """Return pseudo-random numbers in (0, 1), a function of integers."""
    bits = hash_key(*numbers) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
