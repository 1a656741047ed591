"""Mean and variance of columns over clients: each client sends averages, and no example."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int
from numpy.typing import NDArray

from fedpax.aggregators import Aggregator, mean
from fedpax.primitives.map import federated_map
from fedpax.transforms.program import program
from fedpax.transforms.stages import drive

_ROUNDING = 1e-6


class Averages(NamedTuple):
    """Averages over the examples of each client."""

    # of 1 where there is a value, and 0 elsewhere
    present: Float[Array | np.ndarray, "*clients columns"]
    first: Float[Array | np.ndarray, "*clients columns"]  # of the values, 0 where one is missing
    second: Float[Array | np.ndarray, "*clients columns"]  # of their squares


class Moments(NamedTuple):
    """Mean and variance of each column.

    Attributes:
        mean: the mean of the values that are present; 0 for a column without values.
        variance: their variance, divided by their number; 0 for a column without values.
    """

    mean: Float64[np.ndarray, " columns"]
    variance: Float64[np.ndarray, " columns"]


def federated_moments(
    values: Float64[np.ndarray, "examples columns"],
    clients: Int[np.ndarray, " examples"],
    num_clients: int,
    aggregator: Aggregator | None = None,
    *,
    bounds: Float64[np.ndarray, "columns 2"] | None = None,
    limit: Callable[[int], float] | None = None,
    least_deviation: float = 0.0,
) -> Moments:
    """Compute the mean and variance of columns as averages over clients.

    A client averages, for each column, 1 where a value is present, the value x, and x^2. The
    aggregator combines these as the updates of a round, weighted by numbers of examples; a private
    mean has equal weights. With a = sum_k n_k a_k / sum_k n_k:

        mean = a(x) / a(1);  variance = a(x^2) / a(1) - mean^2.

    Without `bounds`, the program runs a second time, on the values minus the first mean, so that
    float32 suffices for columns whose mean is large beside their deviation.

    Args:
        values: the values, NaN where one is missing.
        clients: the client of each example, from 0 to `num_clients` - 1.
        num_clients: number of clients.
        aggregator: combines the clients' averages. Default None: the weighted mean.
        bounds: the least and largest value of each column, to which values are clipped, and scaled
            from them to -1 and 1. Aggregators that limit an update, such as private and secure
            means, need them. Default None: values of any size.
        limit: with `bounds`, `number of entries of an update -> largest absolute value of an
            entry`, such as `lambda n: max_norm / n**0.5`. The averages are scaled to it, so that
            the aggregator clips nothing. Default None: 1.
        least_deviation: with `bounds`, the least deviation of a column as a share of half its
            range: noise can make it much too small.

    Example:
        >>> values = np.array([[1.0], [3.0], [np.nan], [8.0]])
        >>> moments = federated_moments(values, np.array([0, 0, 1, 1]), 2)
        >>> moments.mean.tolist(), moments.variance.round(4).tolist()
        ([4.0], [8.6667])
    """
    return moments_of_blocks(
        lambda: [(values, clients)],
        values.shape[1],
        np.bincount(clients, minlength=num_clients),
        aggregator,
        bounds=bounds,
        limit=limit,
        least_deviation=least_deviation,
    )


def moments_of_blocks(
    blocks: Callable[[], Iterable[tuple[NDArray[np.float64], NDArray[np.integer]]]],
    num_columns: int,
    counts: Int[np.ndarray, " clients"],
    aggregator: Aggregator | None,
    **bounded: Any,
) -> Moments:
    """Compute `federated_moments` of values that are read in blocks, once or twice."""
    # `blocks` returns the values of some examples and their clients, again at each call; `counts`
    # are the examples of each client in all blocks. `moments_steps` takes `bounded`.
    aggregator = mean() if aggregator is None else aggregator
    if not num_columns:
        return Moments(np.zeros(0), np.zeros(0))
    steps = moments_steps(num_columns, **bounded)

    def combine(scaling: Scaling) -> Averages:
        sums = _no_sums(len(counts), num_columns)
        for values, clients in blocks():
            _add_sums(sums, scaling.apply(values), clients)
        averages = _divide(sums, counts)
        aggregate = jax.jit(averages_program(len(counts), aggregator, scaling.factor))
        combined: Averages = aggregate(averages, np.float32(counts))
        return combined

    moments: Moments = drive(steps, combine)
    return moments


class Scaling(NamedTuple):
    """What is done to values before clients average them.

    Values are clipped to `low` and `high`, `center` is subtracted, and `half` divides; `factor`
    multiplies the averages.
    """

    center: Float64[np.ndarray, " columns"]
    half: Float64[np.ndarray, " columns"]
    low: Float64[np.ndarray, " columns"] | None
    high: Float64[np.ndarray, " columns"] | None
    factor: float

    def apply(self, values: Float64[np.ndarray, "examples columns"]) -> NDArray[np.float64]:
        """Scale values."""
        if self.low is not None:
            values = np.clip(values, self.low, self.high)
        return (values - self.center) / self.half


def moments_steps(
    num_columns: int,
    bounds: Float64[np.ndarray, "columns 2"] | None,
    *,
    limit: Callable[[int], float] | None = None,
    least_deviation: float = 0.0,
) -> Generator[Scaling, Any, Moments]:
    """Yield the scalings of `federated_moments`, receive the clients' averages, combined."""
    if bounds is not None:
        center, half = bounds.mean(axis=1), np.diff(bounds, axis=1)[:, 0] / 2
        factor = 1.0 if limit is None else limit(3 * num_columns)
        scaled = _moments((yield Scaling(center, half, bounds[:, 0], bounds[:, 1], factor)))
        # Noise can move them out of the values that they can have.
        average = np.clip(scaled.mean, -1, 1)
        variance = np.clip(scaled.variance, least_deviation**2, 1)
        return Moments(center + half * average, half**2 * variance)
    zeros, ones = np.zeros(num_columns), np.ones(num_columns)
    rough = _moments((yield Scaling(zeros, ones, None, None, 1.0))).mean
    exact = _moments((yield Scaling(rough, ones, None, None, 1.0)))
    # A smaller variance is the rounding of float32, as in a constant column.
    known = exact.variance > _ROUNDING * (exact.variance + exact.mean**2)
    return Moments(rough + exact.mean, np.where(known, exact.variance, 0))


def client_averages(
    values: Float64[np.ndarray, "examples columns"],
    clients: Int[np.ndarray, " examples"],
    counts: Int[np.ndarray, " clients"],
) -> Averages:
    """Average the values of each client over its examples, which is the work of that client."""
    sums = _no_sums(len(counts), values.shape[1])
    _add_sums(sums, values, clients)
    return _divide(sums, counts)


def _no_sums(num_clients: int, num_columns: int) -> Averages:
    """Return what `client_averages` divides by the number of examples, before any example."""
    return Averages(*(np.zeros((num_clients, num_columns), order="F") for _ in Averages._fields))


def _add_sums(
    sums: Averages,
    values: Float64[np.ndarray, "examples columns"],
    clients: Int[np.ndarray, " examples"],
) -> None:
    """Add the values of some examples to the sums of their clients, and to no other row."""
    if not len(clients):
        return
    if (clients[1:] < clients[:-1]).any():
        order = np.argsort(clients, kind="stable")
        values, clients = values[order], clients[order]
    starts = np.flatnonzero(np.diff(clients, prepend=-1))
    rows, lengths = clients[starts], np.diff(starts, append=len(clients))
    for k, column in enumerate(values.T):
        missing = np.isnan(column)
        present: NDArray[Any] = lengths
        if missing.any():
            column = np.where(missing, 0, column)
            present = np.add.reduceat((~missing).astype(np.float64), starts)
        terms = present, np.add.reduceat(column, starts), np.add.reduceat(column**2, starts)
        for total, term in zip(sums, terms, strict=True):
            total[rows, k] += term


def _divide(sums: Averages, counts: Int[np.ndarray, " clients"]) -> Averages:
    return Averages(*((x / np.maximum(counts, 1)[:, None]).astype(np.float32) for x in sums))


def moments_of_ranges(bounds: Float64[np.ndarray, "columns 2"] | None) -> Moments:
    """Return moments with which a range becomes -1 to 1."""
    assert bounds is not None
    return Moments(bounds.mean(axis=1), (np.diff(bounds, axis=1)[:, 0] / 2) ** 2)


def averages_program(
    num_clients: int, aggregator: Aggregator, factor: float
) -> Callable[[Averages, Any], Averages]:
    """Return the program that aggregates the averages of clients, scaled by a factor."""

    @program(clients=num_clients)
    def aggregate(averages: Averages, counts: jax.Array) -> Averages:
        def scale(averages: Averages, count: jax.Array) -> tuple[Averages, jax.Array]:
            # A computed weight can be shown: Bulyan's server reads the weights.
            return jax.tree.map(lambda x: factor * x, averages), jnp.maximum(count, 0)

        scaled, weights = federated_map(scale, averages, counts)
        start = aggregator.init(jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), averages))
        combined: Averages = aggregator.aggregate(start, scaled, weights)[0]
        return jax.tree.map(lambda x: x / factor, combined)

    return aggregate


def _moments(combined: Averages) -> Moments:
    """Return the moments that follow from the averages of all clients together."""
    host = jax.device_get(combined)
    present, first, second = (np.asarray(x, np.float64) for x in host)
    known = present > 0  # noise can make it negative
    average = np.divide(first, present, out=np.zeros_like(first), where=known)
    square = np.divide(second, present, out=np.zeros_like(second), where=known)
    return Moments(average, np.maximum(square - average**2, 0))
