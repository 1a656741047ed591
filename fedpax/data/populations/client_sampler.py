"""ClientSampler: draw the cohort of a round from a population."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from fedpax.data.shuffle import hash_key, shuffled_index

_UNIFORM, _WEIGHTED = 1, 2  # part of the key, so that the two methods are independent of each other


@dataclass(frozen=True, eq=False)
class ClientSampler:
    """Samples clients without replacement.

    A cohort depends on the seed and the round number alone. A run that resumes at round r therefore
    sees the cohorts of an uninterrupted run, on any machine. Uniform sampling takes time in
    proportion to the cohort, however large the population is.

    With weights w, clients are drawn one after another, each with a probability in proportion to
    its weight among the clients that have not been drawn.

    Attributes:
        num_clients: the size of the population; clients are numbered from 0.
        cohort_size: the largest number of clients in a cohort.
        seed: the random seed.
        weights: floats `[num_clients]`, at least 0. Clients of weight 0 are never drawn. Default
            None: sample uniformly.
        available: a function `round -> booleans [num_clients]`, True for clients that can take part
            in that round; it must depend on the round number alone. Default None: every client is
            available in every round.

    Raises:
        ValueError: `cohort_size` is below 1 or above `num_clients`; or `weights` has another shape,
            a negative or non-finite entry, or fewer than `cohort_size` entries above 0.

    Example:
        >>> sampler = ClientSampler(num_clients=1_000_000, cohort_size=4, seed=1)
        >>> sampler.sample(7).tolist() == sampler.sample(7).tolist() != sampler.sample(8).tolist()
        True
        >>> daytime = ClientSampler(6, 2, available=lambda r: np.arange(6) % 2 == r % 2)
        >>> (daytime.sample(0) % 2).tolist(), (daytime.sample(1) % 2).tolist()
        ([0, 0], [1, 1])

    Reference:
        Efraimidis, Spirakis. Weighted Random Sampling with a Reservoir. Information Processing
        Letters 97(5), 2006, for weights.
    """

    num_clients: int
    cohort_size: int
    seed: int = 0
    weights: ArrayLike | None = None
    available: Callable[[int], ArrayLike] | None = None
    _weights: Float64[np.ndarray, " clients"] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Check the sizes and the weights."""
        if self.cohort_size < 1:
            raise ValueError(f"cohort_size is {self.cohort_size}, expected at least 1.")
        if self.cohort_size > self.num_clients:
            raise ValueError(
                f"cohort_size is {self.cohort_size}, but the population has {self.num_clients} "
                f"clients and sampling is without replacement: take {self.num_clients} or fewer."
            )
        if self.weights is None:
            return
        weights = np.asarray(self.weights, np.float64)
        if weights.shape != (self.num_clients,) or not np.all(
            np.isfinite(weights) & (weights >= 0)
        ):
            raise ValueError(
                f"weights has shape {list(weights.shape)}, expected one finite number of at least "
                f"0 for each of the {self.num_clients} clients."
            )
        if (positive := np.count_nonzero(weights)) < self.cohort_size:
            raise ValueError(
                f"Only {positive} clients have a weight above 0, fewer than cohort_size="
                f"{self.cohort_size}: reduce cohort_size, or give more clients a positive weight."
            )
        object.__setattr__(self, "_weights", weights)

    def sample(self, round_number: int) -> Int64[np.ndarray, " cohort"]:
        """Sample the cohort of a round.

        Args:
            round_number: the round, counted from 0.

        Returns:
            int64 `[cohort]`: different clients in random order. There are `cohort_size` of them,
            or all available clients if these are fewer.

        Raises:
            TypeError: `round_number` is not an integer.
            ValueError: `round_number` is negative, no client is available, or `available` does not
                return booleans `[num_clients]`.
        """
        try:
            round_number = operator.index(round_number)
        except TypeError:
            raise TypeError(
                f"sample(): round_number is {round_number!r}, expected an integer from 0."
            ) from None
        if round_number < 0:
            raise ValueError(f"sample(): round_number is {round_number}: rounds count from 0.")
        candidates = self._candidates(round_number)
        count = self.num_clients if candidates is None else len(candidates)
        size = min(self.cohort_size, count)
        if self._weights is None:
            key = hash_key(self.seed, _UNIFORM, round_number)
            sampled = shuffled_index(np.arange(size), count, key)
            return sampled if candidates is None else candidates[sampled]
        client_ids = np.arange(self.num_clients) if candidates is None else candidates
        return client_ids[self._first_arrivals(client_ids, size, round_number)]

    def _candidates(self, round_number: int) -> Int64[np.ndarray, " candidates"] | None:
        """Return the clients that can be drawn in a round, or None for the whole population."""
        if self.available is None:
            return None if self._weights is None else np.flatnonzero(self._weights)
        available = np.asarray(self.available(round_number))
        if available.shape != (self.num_clients,) or available.dtype != np.bool_:
            raise ValueError(
                f"available({round_number}) returned {available.dtype}{list(available.shape)}, "
                f"expected one boolean for each of the {self.num_clients} clients."
            )
        if self._weights is not None:
            available = available & (self._weights > 0)
        if not available.any():
            raise ValueError(
                f"No client is available in round {round_number}: a round needs at least one."
            )
        return np.flatnonzero(available)

    def _first_arrivals(
        self, client_ids: Int64[np.ndarray, " candidates"], size: int, round_number: int
    ) -> Int64[np.ndarray, " cohort"]:
        """Return the positions of the first arrivals of Poisson processes with rates w."""
        assert self._weights is not None
        bits = hash_key(self.seed, _WEIGHTED, round_number, client_ids) >> np.uint64(12)
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52  # in (0, 1)
        # The logarithm of the time, since dividing by a tiny weight would overflow.
        log_times = np.log(-np.log(uniform)) - np.log(self._weights[client_ids])
        first = np.argpartition(log_times, size - 1)[:size]
        return first[np.argsort(log_times[first], kind="stable")]
