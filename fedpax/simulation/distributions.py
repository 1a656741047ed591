"""Distributions of durations: how fast participants are, and when they fail and return."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64

from fedpax.errors import ArgumentError

Draws: TypeAlias = Float64[np.ndarray, " draws"]

Distribution: TypeAlias = Callable[[np.random.Generator, int], Draws]
"""`(generator, count) -> float64 [count]`, independent draws of at least 0. Mostly seconds."""


def constant(value: float) -> Distribution:
    """Make a distribution whose draws all equal `value`.

    Raises:
        ValueError: the value is negative or not finite.

    Example:
        >>> constant(0.5)(np.random.default_rng(0), 2).tolist()
        [0.5, 0.5]
    """
    _check("constant", value=value)
    return lambda generator, count: np.full(count, float(value))


def uniform(low: float, high: float) -> Distribution:
    """Make the uniform distribution on `[low, high)`.

    Raises:
        ValueError: a bound is negative or not finite, or `high` is below `low`.

    Example:
        >>> draws = uniform(2.0, 3.0)(np.random.default_rng(0), 1000)
        >>> bool(draws.min() >= 2), bool(draws.max() < 3)
        (True, True)
    """
    _check("uniform", low=low, high=high)
    if high < low:
        raise ArgumentError(f"uniform(): high is {high}, expected at least low, which is {low}.")
    return lambda generator, count: generator.uniform(low, high, count)


def exponential(mean: float) -> Distribution:
    """Make the exponential distribution: the time until an event of rate 1 / mean.

    Raises:
        ValueError: the mean is 0, negative or not finite.

    Example:
        >>> round(float(exponential(3.0)(np.random.default_rng(0), 100_000).mean()), 1)
        3.0
    """
    _check("exponential", above_0=True, mean=mean)
    return lambda generator, count: generator.exponential(mean, count)


def lognormal(median: float, sigma: float) -> Distribution:
    """Make the lognormal distribution: `median * exp(sigma * z)` for a standard normal z.

    Raises:
        ValueError: `median` is not above 0, or `sigma` is negative, or one is not finite.

    Example:
        >>> round(float(np.median(lognormal(2.0, 0.7)(np.random.default_rng(0), 100_000))), 1)
        2.0
    """
    _check("lognormal", above_0=True, median=median)
    _check("lognormal", sigma=sigma)
    return lambda generator, count: median * np.exp(sigma * generator.standard_normal(count))


def transfer_seconds(
    num_bytes: float, bytes_per_second: Distribution, latency: Distribution | None = None
) -> Distribution:
    """Make the distribution of a transfer's seconds: `latency + num_bytes / bytes_per_second`.

    Args:
        num_bytes: size of the transfer.
        bytes_per_second: distribution of the participants' bandwidth, above 0.
        latency: distribution of the seconds before the first byte. Default None: 0.

    Raises:
        ValueError: `num_bytes` is negative or not finite.

    Example:
        >>> seconds = transfer_seconds(4e6, constant(1e6), latency=constant(0.25))
        >>> seconds(np.random.default_rng(0), 2).tolist()
        [4.25, 4.25]
    """
    _check("transfer_seconds", num_bytes=num_bytes)

    def draw(generator: np.random.Generator, count: int) -> Draws:
        seconds = num_bytes / bytes_per_second(generator, count)
        return seconds if latency is None else seconds + latency(generator, count)

    return draw


def _check(function: str, above_0: bool = False, **values: float) -> None:
    for name, value in values.items():
        if not np.isfinite(value) or value < 0 or (above_0 and value == 0):
            least = "above 0" if above_0 else "of at least 0"
            raise ArgumentError(
                f"{function}(): {name} is {value}, expected a finite number {least}."
            )
