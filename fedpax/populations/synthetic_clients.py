"""Synthetic clients: over a pool of real examples, and the clients of FedProx and of LEAF."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt64
from numpy.typing import ArrayLike, NDArray

from fedpax.checks import check_integers
from fedpax.errors import ArgumentError
from fedpax.populations.client_arrays import ComputedPartition, Indices
from fedpax.populations.partition import index_labels
from fedpax.primitives.casts import checked_cast, host_array, real_number


class DirichletClients(ComputedPartition):
    """A lazily generated population whose clients differ in their labels and sizes.

    Client k depends on the arguments and k alone, and nothing is stored:

    1. Its number of examples is log-normal, rounded and clipped to 1, ..., `max_examples`.
    2. Its label distribution is drawn from Dirichlet(alpha * C * p), with C labels, p their
       distribution in the pool.
    3. Its examples are drawn from the pool with replacement.

    Args:
        labels: integers `[examples]`, the labels of the pool.
        num_clients: the size of the population.
        alpha: the concentration, above 0.
        median_examples: the median number of examples per client.
        sigma: the standard deviation of the logarithm of a client's number of examples.
        max_examples: the largest number of examples per client.
        seed: the random seed.

    Raises:
        TypeError: a size or the seed is not an integer, or another argument is not a real number.
        ValueError: a size is below 1, `alpha` or `median_examples` is not positive and finite,
            `sigma` is negative or infinite, or `labels` is empty or not integers.

    Example:
        >>> labels = [0, 1, 2, 0, 1, 2]
        >>> clients = DirichletClients(labels, 100_000, alpha=0.1, median_examples=4)
        >>> len(clients), clients[99_999].tolist() == clients[99_999].tolist()
        (100000, True)

    Reference:
        Hsu et al., arXiv:1909.06335, section 3.
    """

    def __init__(
        self,
        labels: ArrayLike,
        num_clients: int,
        *,
        alpha: float,
        median_examples: float,
        sigma: float = 0.0,
        max_examples: int = 2**31,
        seed: int = 0,
    ) -> None:
        labels = host_array(labels, "labels")
        if not labels.size:
            raise ArgumentError("labels is empty, expected at least 1.")
        classes, class_index = index_labels(labels)
        for name, size in (("num_clients", num_clients), ("max_examples", max_examples)):
            check_integers(**{name: size})
            if size < 1:
                raise ArgumentError(f"{name} is {size}, expected at least 1.")
        check_integers(seed=seed)
        if not 0 <= real_number("sigma", sigma) < np.inf:
            raise ArgumentError(f"sigma is {sigma}, expected a finite number of at least 0.")
        for name, value in (("alpha", alpha), ("median_examples", median_examples)):
            if not 0 < real_number(name, value) < np.inf:
                raise ArgumentError(f"{name} is {value}, expected a positive number.")
        counts = np.bincount(class_index, minlength=len(classes))
        # The pool sorted by label, and the position of each label's first example.
        self._pool = np.argsort(class_index, kind="stable")
        self._counts, self._starts = counts, np.cumsum(counts) - counts
        self._labels = np.arange(len(counts))
        self._concentration = float(alpha) * counts / counts.mean()
        self._num_clients, self._seed = num_clients, seed
        self._log_median, self._sigma = np.log(float(median_examples)), float(sigma)
        self._max_examples = max_examples
        self._name = (
            f"DirichletClients(num_clients={num_clients}, alpha={alpha}, "
            f"median_examples={median_examples}, sigma={sigma}, max_examples={max_examples}, "
            f"seed={seed}, labels={zlib.crc32(labels.astype('<i8').tobytes())})"
        )

    def __len__(self) -> int:
        return self._num_clients

    def indices_of(self, participant: int) -> Indices:
        """Return the indices of a client's examples, which may repeat."""
        random = self._random(participant)
        size = self._size(random.standard_normal())
        shares = random.standard_gamma(self._concentration)
        if not (total := shares.sum()) > 0:
            # All underflow if alpha is tiny: the client has a single label.
            shares = np.zeros(len(shares))
            shares[
                np.searchsorted(np.cumsum(self._counts), random.randint(len(self._pool)), "right")
            ] = total = 1
        label = np.repeat(self._labels, random.multinomial(size, shares / total))
        offset = (random.random_sample(size) * self._counts[label]).astype(np.int64)  # floor
        return self._pool[self._starts[label] + offset]

    def sizes(self) -> Int64[np.ndarray, " clients"]:
        """Return the number of examples of each client."""
        if not self._sigma:
            return np.full(self._num_clients, self._size(0.0))
        sizes = np.empty(self._num_clients, np.int64)
        for begin in range(0, self._num_clients, 2**18):  # for little memory
            clients = np.arange(begin, min(begin + 2**18, self._num_clients))
            values = np.exp(self._log_median + self._sigma * first_normals(self._seed, clients))
            rounded = np.round(np.minimum(values, self._max_examples))
            # Logarithms of NumPy's and C's libraries may differ in the last bit.
            near = np.flatnonzero(np.abs(np.abs(values - rounded) - 0.5) < 1e-9 * values)
            rounded[near] = [self._size(self._random(k).standard_normal()) for k in clients[near]]
            sizes[clients] = np.maximum(rounded, 1)
        return sizes

    def _random(self, client: int) -> np.random.RandomState:
        # NumPy promises that it never changes, and one from a seed takes ten times as long to make.
        key = np.array([self._seed % 2**64, client], np.uint64)
        return np.random.RandomState(np.random.Philox(key=key))

    def _size(self, normal: float) -> int:
        """Return the number of examples of a client from its normal variate."""
        size = np.exp(self._log_median + self._sigma * normal)
        return max(1, round(min(size, self._max_examples)))

    def __repr__(self) -> str:
        return self._name


# ---- the first normal variates of many random number generators at once
# Making a million of `RandomState(Philox(key=[seed, k]))` takes 10 seconds, this under one.
#
# Salmon et al., SC 2011, for Philox; Marsaglia, Bray, SIAM Review 6, 1964, for the polar method of
# RandomState.

_MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_INCREMENTS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)


def first_normals(seed: int, clients: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return the first normals of `RandomState(Philox([seed, client]))`, but for the last bit."""
    normals = np.empty(len(clients))
    left, counter = np.arange(len(clients)), 0
    while len(left):  # a point of the square is in the circle with probability pi / 4
        counter += 1
        bits = _philox(counter, seed, clients[left].astype(np.uint64))
        uniform = [2.0 * ((word >> np.uint64(11)) * 2.0**-53) - 1.0 for word in bits]
        drawn = np.zeros(len(left), np.bool_)
        for x, y in (uniform[:2], uniform[2:]):
            square = x * x + y * y
            inside = (square < 1.0) & (square != 0.0) & ~drawn
            of_inside = square[inside]
            normals[left[inside]] = np.sqrt(-2.0 * np.log(of_inside) / of_inside) * y[inside]
            drawn |= inside
        left = left[~drawn]
    return normals


def _philox(
    counter: int, seed: int, keys: UInt64[np.ndarray, " n"]
) -> list[UInt64[np.ndarray, " n"]]:
    """Return the four words of Philox4x64-10 at a counter for each of the keys `[seed, key]`."""
    first = np.full(len(keys), seed % 2**64, np.uint64)
    second = keys.copy()
    zero = np.zeros(len(keys), np.uint64)
    words = [np.full(len(keys), counter, np.uint64), zero, zero, zero]
    for _ in range(10):
        (high_0, low_0), (high_1, low_1) = (
            _multiply(multiplier, word)
            for multiplier, word in zip(_MULTIPLIERS, words[::2], strict=True)
        )
        words = [high_1 ^ words[1] ^ first, low_1, high_0 ^ words[3] ^ second, low_0]
        first += _INCREMENTS[0]  # both wrap around
        second += _INCREMENTS[1]
    return words


def _multiply(
    factor: np.uint64, words: UInt64[np.ndarray, " n"]
) -> tuple[UInt64[np.ndarray, " n"], UInt64[np.ndarray, " n"]]:
    high, low = factor >> _HALF, factor & _LOW
    word_high, word_low = words >> _HALF, words & _LOW
    middle = word_high * low + (word_low * low >> _HALF)
    carry = word_low * high + (middle & _LOW)
    return word_high * high + (middle >> _HALF) + (carry >> _HALF), words * factor


def leaf_clients(
    num_clients: int,
    *,
    cluster_probabilities: Sequence[float] = (1.0,),
    num_features: int = 60,
    num_classes: int = 5,
    seed: int = 0,
) -> tuple[dict[str, NDArray[Any]], list[NDArray[np.int64]]]:
    """Generate clients as LEAF's code does: few examples each, and models in clusters.

    With p clusters, client k draws its cluster c by `cluster_probabilities`, and labels its inputs
    by a linear model W_k from a description u_k of size p:

        Q ~ N(0, 1), [num_features + 1, num_classes, p];   m_c ~ N(l_c, 1),  l_c ~ N(0, 1);
        u_k ~ N(m_c, 0.1^2);   W_k = Q u_k;
        x ~ N(v_k, diag(j^-1.2)),  v_k ~ N(B_k, 1),  B_k ~ N(0, 1);
        y = argmax((1, x) W_k + e),  e ~ N(0, 0.1^2).

    Q and the m_c are the same for all clients. The first row of W_k is the bias. The numbers of
    examples are 5 + exp(N(3, 2^2)), rounded down and at most 1,000.

    Args:
        num_clients: number of clients; LEAF's example has 1,000.
        cluster_probabilities: for each cluster, the probability that a client belongs to it.
            Default: one cluster.
        num_features: size of an input.
        num_classes: number of labels.
        seed: random seed.

    Returns:
        Examples, `{"image": float32 [examples, num_features], "label": int32 [examples]}`, and for
        each client the indices of its examples, for `cohort_rounds`.

    Raises:
        ValueError: a size is below 1, or the probabilities are not positive with sum 1.

    Example:
        >>> examples, population = leaf_clients(30, cluster_probabilities=(0.5, 0.5))
        >>> examples["image"].shape[1], len(population), min(map(len, population)) >= 5
        (60, 30, True)

    Reference:
        Caldas et al., LEAF, arXiv:1812.01097, appendix, in the form of the authors' code,
        TalwalkarLab/leaf.
    """
    check_logistic_sizes(num_clients, num_features, num_classes)
    probabilities = checked_cast(cluster_probabilities, np.float64, "cluster_probabilities")
    if (
        probabilities.ndim != 1
        or not np.all(probabilities > 0)
        or abs(probabilities.sum() - 1) > 1e-6
    ):
        raise ArgumentError(
            f"cluster_probabilities is {cluster_probabilities}, expected positive numbers with sum "
            "1, one for each cluster, such as (0.5, 0.5)."
        )
    num_clusters = len(probabilities)
    rng = np.random.default_rng(seed)
    sizes = np.minimum(5 + rng.lognormal(3, 2, num_clients), 1000).astype(np.int64)
    descriptions_to_weights = rng.normal(size=(num_features + 1, num_classes, num_clusters))
    centers = rng.normal(rng.normal(size=(num_clusters, 1)), 1, (num_clusters, num_clusters))
    deviation = np.arange(1, num_features + 1) ** -0.6
    clients = []
    for size in sizes:
        cluster = rng.choice(num_clusters, p=probabilities)
        weights = descriptions_to_weights @ rng.normal(centers[cluster], 0.1)
        center = rng.normal(rng.normal(), 1, num_features)
        image = center + deviation * rng.normal(size=(size, num_features))
        logits = weights[0] + image @ weights[1:] + rng.normal(0, 0.1, (size, num_classes))
        clients.append((image, logits))
    return gather_examples(clients)


def logistic_clients(
    num_clients: int,
    *,
    alpha: float,
    beta: float,
    num_features: int = 60,
    num_classes: int = 10,
    seed: int = 0,
) -> tuple[dict[str, NDArray[Any]], list[NDArray[np.int64]]]:
    """Generate clients with different logistic models and different inputs.

    Client k labels its inputs by its own model, y = argmax(W_k x + b_k):

        W_k, b_k ~ N(u_k, 1),  u_k ~ N(0, alpha);
        x ~ N(v_k, diag(j^-1.2)),  v_k ~ N(B_k, 1),  B_k ~ N(0, beta).

    The numbers of examples are 50 + exp(N(4, 2^2)), at most 5,000.

    Args:
        num_clients: number of clients; the paper has 30.
        alpha: variance of the clients' models, at least 0.
        beta: variance of the clients' inputs, at least 0.
        num_features: size of an input.
        num_classes: number of labels.
        seed: random seed.

    Returns:
        Examples, `{"image": float32 [examples, num_features], "label": int32 [examples]}`, and for
        each client the indices of its examples, for `cohort_rounds`.

    Raises:
        ValueError: a size is below 1, or a variance is below 0.

    Example:
        >>> examples, population = logistic_clients(30, alpha=1.0, beta=1.0)
        >>> examples["image"].shape[1], len(population), sum(map(len, population)) > 1500
        (60, 30, True)

    Reference:
        Li et al., arXiv:1812.06127, section 5.1.
    """
    check_logistic_sizes(num_clients, num_features, num_classes)
    for name, variance in ("alpha", alpha), ("beta", beta):
        if not 0 <= real_number(name, variance) < np.inf:
            raise ArgumentError(f"{name} is {variance}, expected a finite variance of at least 0.")
    rng = np.random.default_rng(seed)
    sizes = np.minimum(50 + rng.lognormal(4, 2, num_clients), 5000).astype(np.int64)
    deviation = np.arange(1, num_features + 1) ** -0.6
    clients = []
    for size in sizes:
        u, b = rng.normal(0, np.sqrt(alpha)), rng.normal(0, np.sqrt(beta))
        weights = rng.normal(u, 1, (num_features, num_classes))
        bias = rng.normal(u, 1, num_classes)
        center = rng.normal(b, 1, num_features)
        image = center + deviation * rng.normal(size=(size, num_features))
        clients.append((image, image @ weights + bias))
    return gather_examples(clients)


def gather_examples(
    clients: Sequence[tuple[NDArray[Any], NDArray[Any]]],
) -> tuple[dict[str, NDArray[Any]], list[NDArray[np.int64]]]:
    """Concatenate inputs, and labels from logits, of clients; return the indices of each client."""
    images, labels = (np.concatenate(values) for values in zip(*clients, strict=True))
    ends = np.cumsum([len(image) for image, _ in clients])
    examples = {
        "image": images.astype(np.float32),
        "label": np.argmax(labels, axis=1).astype(np.int32),
    }
    return examples, np.split(np.arange(len(images)), ends[:-1])


def check_logistic_sizes(num_clients: int, num_features: int, num_classes: int) -> None:
    """Check the sizes of a population with logistic models."""
    check_integers(num_clients=num_clients, num_features=num_features, num_classes=num_classes)
    if min(num_clients, num_features, num_classes) < 1:
        raise ArgumentError(
            f"num_clients is {num_clients}, num_features {num_features} and num_classes "
            f"{num_classes}, expected at least 1 each."
        )
