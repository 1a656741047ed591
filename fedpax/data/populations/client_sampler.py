"""ClientSampler: which clients of a population take part in a round."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.data.shuffle import fold, shuffled

_UNIFORM, _WEIGHTED = 1, 2  # so that the two draw different clients from one seed


@dataclass(frozen=True, eq=False)
class ClientSampler:
    """Draws clients without replacement; a cohort depends on the seed and the round alone.

    Whoever goes on from round r after a stop draws what an unbroken run would have drawn, on any
    machine. A uniform cohort costs as much as its own size, however large the population is.

    With weights w, the clients are drawn one after another, each with a probability in proportion
    to its weight among those that are left.

    Attributes:
        population: how many clients there are; they are numbered from 0.
        size: how many of them a cohort has at most.
        seed: chooses the cohorts.
        weights: floats [population], at least 0; None draws uniformly. Clients of weight 0 are
            never drawn.
        available: `round -> booleans [population]`, who can be reached in that round, a function
            of the round alone; None is everybody.

    Raises:
        ValueError: a size below 1 or above the population, or weights that do not fit.

    Example:
        >>> cohorts = ClientSampler(population=1_000_000, size=4, seed=1)
        >>> cohorts.draw(7).tolist() == cohorts.draw(7).tolist() != cohorts.draw(8).tolist()
        True
        >>> daytime = ClientSampler(6, 2, available=lambda r: np.arange(6) % 2 == r % 2)
        >>> (daytime.draw(0) % 2).tolist(), (daytime.draw(1) % 2).tolist()
        ([0, 0], [1, 1])

    Reference:
        Efraimidis, Spirakis. Weighted Random Sampling with a Reservoir. Information Processing
        Letters 97(5), 2006, for weights.
    """

    population: int
    size: int
    seed: int = 0
    weights: ArrayLike | None = None
    available: Callable[[int], ArrayLike] | None = None
    _weights: NDArray[np.float64] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Checks the sizes and the weights."""
        if self.size < 1:
            raise ValueError(f"A cohort of {self.size} clients is empty: take at least 1.")
        if self.size > self.population:
            raise ValueError(
                f"A cohort of {self.size} clients cannot be drawn without replacement from a "
                f"population of {self.population}: take {self.population} or fewer."
            )
        if self.weights is None:
            return
        weights = np.asarray(self.weights, np.float64)
        if weights.shape != (self.population,) or not np.all(np.isfinite(weights) & (weights >= 0)):
            raise ValueError(
                f"weights has shape {list(weights.shape)}, expected one finite number of at least "
                f"0 for each of the {self.population} clients."
            )
        if (able := np.count_nonzero(weights)) < self.size:
            raise ValueError(
                f"Only {able} clients have a weight above 0, fewer than a cohort of {self.size}: "
                "take a smaller cohort, or give more clients a weight."
            )
        object.__setattr__(self, "_weights", weights)

    def draw(self, round_number: int) -> NDArray[np.int64]:
        """Draws the cohort of a round.

        Args:
            round_number: from 0.

        Returns:
            int64 [clients]: `size` different clients in random order; fewer, and then all that can
            be drawn, where fewer are available.

        Raises:
            TypeError: the round is no whole number.
            ValueError: it is negative, nobody is available, or `available` gives no booleans
                [population].
        """
        try:
            round_number = operator.index(round_number)
        except TypeError:
            raise TypeError(
                f"draw() was given round {round_number!r}, expected a whole number from 0."
            ) from None
        if round_number < 0:
            raise ValueError(f"draw() was given round {round_number}: rounds count from 0.")
        candidates = self._candidates(round_number)
        count = self.population if candidates is None else len(candidates)
        taken = min(self.size, count)
        if self._weights is None:
            key = fold(self.seed, _UNIFORM, round_number)
            chosen = shuffled(np.arange(taken), count, key)
            return chosen if candidates is None else candidates[chosen]
        clients = np.arange(self.population) if candidates is None else candidates
        return clients[self._first(clients, taken, round_number)]

    def _candidates(self, round_number: int) -> NDArray[np.int64] | None:
        """Who can be drawn; None for everybody."""
        if self.available is None:
            return None if self._weights is None else np.flatnonzero(self._weights)
        reachable = np.asarray(self.available(round_number))
        if reachable.shape != (self.population,) or reachable.dtype != np.bool_:
            raise ValueError(
                f"available({round_number}) gives {reachable.dtype}{list(reachable.shape)}, "
                f"expected one boolean for each of the {self.population} clients."
            )
        if self._weights is not None:
            reachable = reachable & (self._weights > 0)
        if not reachable.any():
            raise ValueError(
                f"No client is available in round {round_number}: a round needs at least one."
            )
        return np.flatnonzero(reachable)

    def _first(
        self, clients: NDArray[np.int64], taken: int, round_number: int
    ) -> NDArray[np.int64]:
        """The places of those that arrive first, where a client arrives with its weight as rate."""
        assert self._weights is not None
        bits = fold(self.seed, _WEIGHTED, round_number, clients) >> np.uint64(12)
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52  # in (0, 1)
        # The logarithm of the time, since dividing by a tiny weight would overflow.
        arrival = np.log(-np.log(uniform)) - np.log(self._weights[clients])
        near = np.argpartition(arrival, taken - 1)[:taken]
        return near[np.argsort(arrival[near], kind="stable")]
