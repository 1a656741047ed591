"""Epsilon after some rounds of discrete Gaussian noise, inside a program and outside."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpax.checks import COUNT_OR_ZERO, Range, check_argument

# Around the order that is best if it is large.
_FACTORS = [2 ** (k / 20) for k in range(-60, 61)]


# The cache of `jax.jit` depends on a user context.
_releases = jax.make_user_context(1)


@contextmanager
def several_releases(number: int) -> Iterator[None]:
    """Count each aggregate as one of several releases of a round, such as one for each fragment."""
    with _releases(_releases.value * number):
        yield


def releases_per_round() -> int:
    """Return the number of times that a round tells something of each participant's update."""
    return int(_releases.value)


class PrivacyAccountant(NamedTuple):
    """Tells the epsilon that rounds with Gaussian noise, discrete or not, have spent.

    A private aggregator has one, `aggregator.accountant`, and its metric `"epsilon"` is computed by
    it: it is the same in `jax.jit(round)` and on every engine.

    Each round counts as a release to every participant, without amplification by sampling.

    Attributes:
        noise_multiplier: z, as in `private_secure_mean`.
        delta: the probability of (epsilon, delta)-differential privacy.
        releases_before: number of releases before the first round, each with the same noise.

    Example:
        >>> accountant = PrivacyAccountant(noise_multiplier=4.0, delta=1e-6)
        >>> f"{accountant.epsilon(1):.2f}, {accountant.epsilon(100):.2f}"
        '1.14, 15.33'

    Reference:
        Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy,
        arXiv:2004.00010, corollary 13.
    """

    noise_multiplier: float
    delta: float
    releases_before: int = 0

    @overload
    def epsilon(self, num_rounds: int) -> float: ...
    @overload
    def epsilon(self, num_rounds: Int[Array, ""]) -> Float[Array, ""]: ...
    def epsilon(self, num_rounds: int | Int[Array, ""]) -> float | Float[Array, ""]:
        """Return epsilon after a number of rounds, and of releases before them; together 1 or more.

        Args:
            num_rounds: an int, or an int32 scalar inside a program.

        Returns:
            A float, or a float32 scalar inside a program.
        """
        rho = (num_rounds + self.releases_before) * (0.5 / self.noise_multiplier**2)
        # Each order a gives a bound: rho a + log(1 - 1 / a) - log(delta a) / (a - 1).
        beyond = jnp.sqrt(-math.log(self.delta) / rho) * jnp.array(_FACTORS)  # a - 1
        order = 1 + beyond
        conversion = jnp.log1p(-1 / order) - (math.log(self.delta) + jnp.log(order)) / beyond
        epsilon = jnp.maximum(jnp.min(rho * order + conversion), 0)
        return epsilon if isinstance(num_rounds, jax.Array) else float(epsilon)


def accountant_of(
    function: str, noise_multiplier: float, delta: float, releases_before: int
) -> PrivacyAccountant | None:
    """Check the arguments of an aggregator, and return its accountant; None without noise."""
    remedy = "Use well below 1 over the population's size, such as 1e-6."
    delta = check_argument(function, "delta", delta, Range(above=0, below=1), remedy=remedy)
    remedy = "Use 0 if the clients have sent nothing before the first round."
    releases_before = check_argument(
        function, "releases_before", releases_before, COUNT_OR_ZERO, remedy=remedy
    )
    if not noise_multiplier:
        return None
    return PrivacyAccountant(noise_multiplier, delta, releases_before)
