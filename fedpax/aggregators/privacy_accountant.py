"""Epsilon after some rounds of discrete Gaussian noise, inside a program and outside."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
    """Tells the epsilon that rounds with discrete Gaussian noise have spent.

    An aggregator whose noise comes from the participants has one, `aggregator.accountant`, and its
    metric `"epsilon"` is computed by it: it is the same in `jax.jit(round)` and on every engine.

    Each round counts as a release to every participant, without amplification by sampling.

    Attributes:
        noise_multiplier: z, as in `private_secure_mean`.
        delta: the probability of (epsilon, delta)-differential privacy.

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

    @overload
    def epsilon(self, num_rounds: int) -> float: ...
    @overload
    def epsilon(self, num_rounds: Int[Array, ""]) -> Float[Array, ""]: ...
    def epsilon(self, num_rounds: int | Int[Array, ""]) -> float | Float[Array, ""]:
        """Return epsilon after a number of rounds, at least 1.

        Args:
            num_rounds: an int, or an int32 scalar inside a program.

        Returns:
            A float, or a float32 scalar inside a program.
        """
        rho = num_rounds * (0.5 / self.noise_multiplier**2)
        # Each order a gives a bound: rho a + log(1 - 1 / a) - log(delta a) / (a - 1).
        beyond = jnp.sqrt(-math.log(self.delta) / rho) * jnp.array(_FACTORS)  # a - 1
        order = 1 + beyond
        conversion = jnp.log1p(-1 / order) - (math.log(self.delta) + jnp.log(order)) / beyond
        epsilon = jnp.maximum(jnp.min(rho * order + conversion), 0)
        return epsilon if isinstance(num_rounds, jax.Array) else float(epsilon)
