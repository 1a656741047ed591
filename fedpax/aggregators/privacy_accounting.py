"""Epsilon of private means over rounds: exact without sampling, else by dp-accounting."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpax.checks import (
    COUNT,
    COUNT_OR_ZERO,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Range,
    check_argument,
)
from fedpax.errors import ArgumentError, MissingPackageError

FINEST_GRID = 1e-4  # of privacy losses; the default of dp-accounting
MOST_POINTS = 1e5  # of the grid, for losses as large as epsilon; more take minutes and gigabytes
MOST_LOSS = 1e5  # larger privacy losses are accounted without sampling
MOST_SAMPLED_NOISE = 1e8  # with more, dp-accounting takes the logarithm of 0 for a fixed size
LEAST_NOISE = 1e-15  # less is as good as none, and beyond float32
MOST_NOISE = 1e9  # the largest noise multiplier that is searched
NEWTON_STEPS = 12  # more than an epsilon from 1e-6 to 1e9 takes
TOLERANCE = 1e-3  # of the noise multiplier that is found


def privacy_spent(
    *,
    noise_multiplier: float,
    num_rounds: int,
    delta: float,
    sampling_probability: float | None = None,
    cohort_size: int | None = None,
    num_clients: int | None = None,
    discrete: bool = False,
    releases_before: int = 0,
) -> float:
    """Compute the epsilon of (epsilon, delta)-differential privacy after some rounds.

    A shuffled pass over the population is no sampling:

    - Poisson: every participant joins each round independently, with `sampling_probability`.
      Neighbouring populations differ by one participant, added or removed.
    - Fixed size: each round draws `cohort_size` of `num_clients` participants, uniformly without
      replacement. Neighbouring populations differ in one participant, replaced by another. The sum
      then changes by up to `2 max_norm`.
    - Neither: every participant joins every round. One participant is added or removed.

    No sampling is accounted exactly. Poisson sampling is accounted by privacy loss distributions on
    a grid, and a fixed size by the Renyi bound of the reference. Both are upper bounds, at most
    epsilon without sampling for the same neighbouring populations.

    Args:
        noise_multiplier: z, the standard deviation of the noise of the sum over the clipping norm;
            with adaptive clipping, of both sums together.
        num_rounds: number of rounds, at least 1.
        delta: well below 1 over the population's size.
        sampling_probability: probability of joining a round, for Poisson sampling.
        cohort_size: number of participants of a round, for a fixed size.
        num_clients: number of clients to draw from; given with `cohort_size`.
        discrete: the noise is discrete Gaussian, as in `private_secure_mean`, without sampling.
        releases_before: number of releases with the same noise multiplier to all clients before the
            first round; without sampling.

    Returns:
        Epsilon; infinity if `noise_multiplier` is below 1e-15.

    Raises:
        ImportError: the dp-accounting library, for sampled rounds, is not installed.
        TypeError: an argument is not a number.
        ValueError: an argument is out of range, or the two kinds of sampling are mixed, or either
            is given for discrete noise.

    Example:
        >>> epsilon = privacy_spent(
        ...     noise_multiplier=1.0, num_rounds=1000, delta=1e-6, sampling_probability=0.001)
        >>> round(epsilon, 2)
        0.19

    Reference:
        McMahan et al., arXiv:1710.06963, section 3. Balle and Wang, arXiv:1805.06530, theorem 8
        (without sampling). Wang et al., arXiv:1808.00087, theorem 27 (fixed size). Koskela et al.,
        arXiv:1906.03049 (privacy loss distributions). Kairouz et al., arXiv:2102.06387, proposition
        14 (discrete noise).
    """
    name = "privacy_spent"
    remedy = "Use the noise_multiplier of private_mean()."
    noise = check_argument(name, "noise_multiplier", noise_multiplier, NON_NEGATIVE, remedy=remedy)
    rounds = num_rounds, releases_before
    spent = _account(name, rounds, delta, sampling_probability, cohort_size, num_clients, discrete)
    return math.inf if noise < LEAST_NOISE else spent(noise)


def noise_multiplier_for(
    *,
    epsilon: float,
    num_rounds: int,
    delta: float,
    sampling_probability: float | None = None,
    cohort_size: int | None = None,
    num_clients: int | None = None,
    discrete: bool = False,
    releases_before: int = 0,
) -> float:
    """Find the smallest noise multiplier that spends at most epsilon: inverts `privacy_spent`.

    `epsilon` is the budget, above 0; other arguments are as in `privacy_spent`.

    Returns:
        The noise multiplier, at most 0.001 above the smallest one.

    Raises:
        ImportError, TypeError: as for `privacy_spent`.
        ValueError: as for `privacy_spent`, or no noise multiplier up to 10^9 reaches epsilon: the
            accountants' bounds do not go to 0.

    Example:
        >>> noise_multiplier = noise_multiplier_for(epsilon=2.0, num_rounds=1, delta=1e-6)
        >>> round(noise_multiplier, 3)
        2.231
    """
    name = "noise_multiplier_for"
    remedy = "Use 1.0 to 10.0; the smaller epsilon is, the more noise is needed."
    epsilon = check_argument(name, "epsilon", epsilon, POSITIVE, remedy=remedy)
    rounds = num_rounds, releases_before
    spent = _account(name, rounds, delta, sampling_probability, cohort_size, num_clients, discrete)
    lower = upper = 1.0
    while spent(upper) > epsilon:
        lower, upper = upper, 2 * upper
        if upper > MOST_NOISE:
            smaller = "cohort_size" if cohort_size is not None else "sampling_probability"
            is_sampled = (sampling_probability, cohort_size) != (None, None)
            remedy = f"fewer rounds, or take a smaller {smaller}" if is_sampled else "fewer rounds"
            raise ArgumentError(
                f"{name}(): no noise multiplier up to {MOST_NOISE:.0e} reaches epsilon={epsilon} "
                f"with delta={delta} in {num_rounds} rounds. Increase epsilon or delta, or run "
                f"{remedy}."
            )
    while spent(lower) <= epsilon:
        lower, upper = lower / 2, lower
        if upper < TOLERANCE:
            return upper
    while upper - lower > TOLERANCE:
        middle = (lower + upper) / 2
        if spent(middle) > epsilon:
            lower = middle
        else:
            upper = middle
    return upper


def _account(
    function: str,
    rounds: tuple[int, int],
    delta: float,
    sampling_probability: float | None,
    cohort_size: int | None,
    num_clients: int | None,
    discrete: bool,
) -> Callable[[float], float]:
    """Check the arguments that describe the rounds, and return epsilon by noise multiplier."""
    remedy = "Use the number of rounds of the training."
    num_rounds = check_argument(function, "num_rounds", rounds[0], COUNT, remedy=remedy)
    before = _check_releases_before(function, rounds[1])
    remedy = "Use well below 1 over the population's size, such as 1e-6."
    delta = check_argument(function, "delta", delta, Range(above=0, below=1), remedy=remedy)
    if (cohort_size is None) != (num_clients is None):
        raise ArgumentError(
            f"{function}(): cohort_size is {cohort_size} and num_clients is {num_clients}, "
            "expected both, or neither. Pass both for cohorts of a fixed size."
        )
    if sampling_probability is not None and cohort_size is not None:
        raise ArgumentError(
            f"{function}(): got sampling_probability, for Poisson sampling, and cohort_size, for "
            "cohorts of a fixed size. Pass the one by which cohorts are drawn."
        )
    if discrete and (sampling_probability, cohort_size) != (None, None):
        raise ArgumentError(
            f"{function}(): discrete noise is accounted without sampling. Leave out "
            "sampling_probability, cohort_size and num_clients."
        )
    if discrete:
        return lambda noise: PrivacyAccountant(noise, delta, before, True).epsilon(num_rounds)
    apart: dict[str, Any] = {"num_rounds": num_rounds, "before": before, "delta": delta}
    if sampling_probability is not None:
        remedy = "Divide the expected size of a cohort by the population's size."
        probability = check_argument(
            function, "sampling_probability", sampling_probability, PROBABILITY, remedy=remedy
        )
        return functools.partial(_poisson_epsilon, **apart, probability=probability)
    if cohort_size is None or num_clients is None:
        return functools.partial(_gaussian_epsilon, num_rounds=num_rounds + before, delta=delta)
    size = check_argument(
        function, "cohort_size", cohort_size, COUNT, remedy="Use the size of a round's cohort."
    )
    population = check_argument(
        function, "num_clients", num_clients, COUNT, remedy="Use the population's size."
    )
    if size > population:
        raise ArgumentError(
            f"{function}(): cohort_size is {size}, expected at most num_clients = {population}. "
            "Cohorts are drawn without replacement: use a smaller cohort."
        )
    sizes = {"cohort_size": size, "num_clients": population}
    return functools.partial(_fixed_size_epsilon, **apart, **sizes)


def _check_releases_before(function: str, number: int) -> int:
    remedy = "Use 0 if the clients have sent nothing before the first round."
    return check_argument(function, "releases_before", number, COUNT_OR_ZERO, remedy=remedy)


def _gaussian_epsilon(noise: float, num_rounds: Any, delta: float) -> Any:
    """Return the exact epsilon without sampling; float32 for a number that is an array."""
    is_array = isinstance(num_rounds, jax.Array)
    log, largest, bound = (jnp.log, jnp.maximum, 0.1) if is_array else (math.log, max, 1e-3)
    shift = (jnp.sqrt(jnp.float32(num_rounds)) if is_array else math.sqrt(num_rounds)) / noise

    # For epsilon = shift (x + shift / 2), delta is phi(x) (tail(x) - tail(x + shift)). Its
    # logarithm is concave: Newton's steps from above stay above the root.
    def step(_: Any, x: Any) -> Any:
        low, middle, high = _tail(x), x + shift / 2, _tail(x + shift)
        # The integral of 1 - x tail(x) by Simpson's rule, where the difference would be rounding.
        weighted = x * low + 4 * middle * _tail(middle) + (x + shift) * high
        is_small = shift < bound
        difference = is_small * shift * (1 - weighted / 6) + (1 - is_small) * (low - high)
        excess = log(difference) - 0.5 * (x * x + math.log(2 * math.pi)) - math.log(delta)
        return largest(x + excess * difference / shift / high, -shift / 2)

    x = -statistics.NormalDist().inv_cdf(delta)
    if is_array:
        x = jax.lax.fori_loop(0, NEWTON_STEPS, step, jnp.float32(x))
    else:
        x = functools.reduce(lambda x, k: step(k, x), range(NEWTON_STEPS), x)
    return largest(shift * (x + shift / 2), 0.0)


def _tail(x: Any) -> Any:
    """Return Mills' ratio (1 - Phi(x)) / phi(x)."""
    if isinstance(x, jax.Array):
        return math.sqrt(math.pi / 2) * jax.scipy.special.erfcx(x / math.sqrt(2))
    square = x * x
    if x < 25:
        return math.sqrt(math.pi / 2) * math.exp(square / 2) * math.erfc(x / math.sqrt(2))
    return (1 - (1 - (3 - 15 / square) / square) / square) / x


def _poisson_epsilon(
    noise: float, num_rounds: int, before: int, delta: float, probability: float
) -> float:
    dp = _import_dp_accounting()
    unsampled = _gaussian_epsilon(noise, num_rounds + before, delta)
    loss = 0.5 / noise / noise + 10 / noise  # of a round, up to ten standard deviations
    if probability == 1 or loss > MOST_LOSS:
        return unsampled
    sampled = dp.PoissonSampledDpEvent(probability, dp.GaussianDpEvent(noise))
    event = dp.SelfComposedDpEvent(sampled, num_rounds)
    if before:
        event = dp.ComposedDpEvent([dp.GaussianDpEvent(noise / math.sqrt(before)), event])
    # Bounds of integer orders are fast, and show how large the losses are.
    renyi = dp.rdp.RdpAccountant(orders=[*range(2, 65), 128, 256, 512, 1024])
    renyi.compose(event)
    largest = max(loss, min(unsampled, renyi.get_epsilon(delta)))
    if largest > MOST_LOSS:
        return unsampled
    grid = max(FINEST_GRID, largest / MOST_POINTS)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=grid)
    accountant.compose(event)
    return min(unsampled, float(accountant.get_epsilon(delta)))


def _fixed_size_epsilon(
    noise: float, num_rounds: int, before: int, delta: float, cohort_size: int, num_clients: int
) -> float:
    dp = _import_dp_accounting()
    noise /= 2  # replacing a participant changes the sum by up to twice the clipping norm
    unsampled = _gaussian_epsilon(noise, num_rounds + before, delta)
    if unsampled > MOST_LOSS or noise > MOST_SAMPLED_NOISE:
        return unsampled
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(num_clients, cohort_size, dp.GaussianDpEvent(noise))
    accountant.compose(event, num_rounds)
    if before:
        accountant.compose(dp.GaussianDpEvent(noise), before)
    return min(unsampled, float(accountant.get_epsilon(delta)))


def _import_dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise MissingPackageError(
            "The epsilon of sampled rounds is computed by the dp-accounting library, which is not "
            "installed. Install it: pip install 'fedpax[privacy]'."
        ) from error
    return dp_accounting


_FACTORS = [2 ** (k / 20) for k in range(-60, 61)]  # around the best order, if it is large


class PrivacyAccountant(NamedTuple):
    """Tells the epsilon that rounds with Gaussian or discrete Gaussian noise have spent.

    `aggregator.accountant` of a private aggregator is one, and computes its metric `"epsilon"`.

    Each round counts as a release to every participant, without amplification by sampling. Epsilon
    is exact for Gaussian noise, an upper bound for discrete noise.

    Attributes:
        noise_multiplier: z, as in `private_mean`. Without noise, 0, epsilon is infinite.
        delta: the probability of (epsilon, delta)-differential privacy.
        releases_before: number of releases before the first round, each with the same noise.
        discrete: the noise is discrete Gaussian, as in `private_secure_mean`.

    Example:
        >>> accountant = PrivacyAccountant(noise_multiplier=4.0, delta=1e-6)
        >>> f"{accountant.epsilon(1):.2f}, {accountant.epsilon(100):.2f}"
        '1.06, 14.45'

    Reference:
        Balle and Wang, arXiv:1805.06530, theorem 8.
        Canonne et al., arXiv:2004.00010, corollary 13.
    """

    noise_multiplier: float
    delta: float
    releases_before: int = 0
    discrete: bool = False

    @overload
    def epsilon(self, num_rounds: int) -> float: ...
    @overload
    def epsilon(self, num_rounds: Int[Array, ""]) -> Float[Array, ""]: ...
    def epsilon(self, num_rounds: int | Int[Array, ""]) -> float | Float[Array, ""]:
        """Return epsilon after a number of rounds and the releases before them; together 1 or more.

        A float, or inside a program a float32 scalar. Infinity if the noise is below 1e-15.
        """
        if self.noise_multiplier < LEAST_NOISE:
            return jnp.full((), math.inf) if isinstance(num_rounds, jax.Array) else math.inf
        releases = num_rounds + self.releases_before
        if not self.discrete:
            return _gaussian_epsilon(self.noise_multiplier, releases, self.delta)
        rho = releases * (0.5 / self.noise_multiplier**2)
        # Each order a gives a bound: rho a + log(1 - 1 / a) - log(delta a) / (a - 1). In float32, a
        # is 1 where the noise is small: a - 1 is used.
        beyond = jnp.sqrt(-math.log(self.delta) / rho) * jnp.array(_FACTORS)  # a - 1
        conversion = -jnp.log1p(1 / beyond) - (math.log(self.delta) + jnp.log1p(beyond)) / beyond
        epsilon = jnp.maximum(jnp.min(rho * (1 + beyond) + conversion), 0)
        return epsilon if isinstance(num_rounds, jax.Array) else float(epsilon)


def accountant_of(
    function: str, noise_multiplier: float, delta: float, releases_before: int, discrete: bool
) -> PrivacyAccountant | None:
    """Check the arguments of an aggregator, and return its accountant; None without noise."""
    remedy = "Use well below 1 over the population's size, such as 1e-6."
    delta = check_argument(function, "delta", delta, Range(above=0, below=1), remedy=remedy)
    releases_before = _check_releases_before(function, releases_before)
    if not noise_multiplier:
        return None
    return PrivacyAccountant(noise_multiplier, delta, releases_before, discrete)
