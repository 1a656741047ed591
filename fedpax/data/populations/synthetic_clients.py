"""A population of any size over real examples: each client's share is made when it is asked for."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.data.populations.partition import number_labels


class DirichletClients(Sequence[NDArray[np.int64]]):
    """Clients that differ in their labels and in how much they have, over one pool of examples.

    A client has a log-normal number of examples, rounded and cut to 1, ..., `most`. Its labels are
    distributed by a draw of its own from Dirichlet(alpha * p), p the labels' shares in the pool
    times their number; its examples are drawn with replacement from the pool. All this depends on
    the arguments and the client's number alone, and nothing is stored for a client, so a
    population may be far larger than the pool.

    Args:
        labels: integers [examples], the labels of the pool.
        clients: how many clients there are.
        alpha: small for clients of few labels, large for clients that are alike.
        median: the median number of a client's examples.
        sigma: the standard deviation of the logarithm of that number; 0 gives all as many.
        most: the largest number of a client's examples.
        seed: chooses the population.

    Raises:
        ValueError: a size below 1, an alpha or a median that is not positive, a sigma that is
            negative or infinite, no labels, or labels that are not integers.

    Example:
        >>> clients = DirichletClients([0, 1, 2, 0, 1, 2], clients=100_000, alpha=0.1, median=4)
        >>> len(clients), clients[99_999].tolist() == clients[99_999].tolist()
        (100000, True)

    Reference:
        Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated
        Visual Classification, arXiv:1909.06335, section 3.
    """

    def __init__(
        self,
        labels: ArrayLike,
        clients: int,
        *,
        alpha: float,
        median: float,
        sigma: float = 0.0,
        most: int = 2**31,
        seed: int = 0,
    ) -> None:
        of_examples = np.asarray(labels)
        if not of_examples.size:
            raise ValueError("There are 0 labels, expected at least 1.")
        classes, numbers = number_labels(of_examples)
        for name, size in (("clients", clients), ("most", most)):
            if size < 1:
                raise ValueError(f"{name} is {size}, expected at least 1.")
        if not 0 <= sigma < np.inf:
            raise ValueError(f"sigma is {sigma}, expected a finite number of at least 0.")
        for name, value in (("alpha", alpha), ("median", median)):
            if not 0 < value < np.inf:
                raise ValueError(f"{name} is {value}, expected a positive number.")
        counts = np.bincount(numbers, minlength=len(classes))
        # The pool sorted by label, and where each label begins.
        self._pool = np.argsort(numbers, kind="stable")
        self._counts, self._begins = counts, np.cumsum(counts) - counts
        self._concentration = alpha * counts / counts.mean()
        self._clients, self._seed = clients, seed
        self._median, self._sigma, self._most = median, sigma, most
        self._name = (
            f"DirichletClients(clients={clients}, alpha={alpha}, median={median}, sigma={sigma}, "
            f"most={most}, seed={seed}, labels={zlib.crc32(of_examples.astype('<i8').tobytes())})"
        )

    def __len__(self) -> int:
        return self._clients

    def __getitem__(self, client):  # type: ignore[no-untyped-def]
        """Returns the indices of a client's examples, int64 [examples]; some may stand twice.

        Of a slice, a list with those of each client.
        """
        number = range(self._clients)[client]
        if isinstance(number, range):
            return [self[k] for k in number]
        # By NumPy's promise neither part of this generator ever gives other numbers, and it is
        # ten times cheaper to make than one from a seed.
        key = np.array([self._seed % 2**64, number], np.uint64)
        random = np.random.RandomState(np.random.Philox(key=key))
        size = np.exp(np.log(self._median) + self._sigma * random.standard_normal())
        size = max(1, round(min(size, self._most)))
        shares = random.standard_gamma(self._concentration)
        if not shares.sum() > 0:  # all of them underflow where alpha is tiny: one label is all
            shares = np.zeros(len(shares))
            shares[
                np.searchsorted(np.cumsum(self._counts), random.randint(len(self._pool)), "right")
            ] = 1
        of_label = random.multinomial(size, shares / shares.sum())
        label = np.repeat(np.arange(len(shares)), of_label)
        own = np.floor(random.random_sample(size) * self._counts[label]).astype(np.int64)
        return self._pool[self._begins[label] + own]

    def __repr__(self) -> str:
        return self._name
