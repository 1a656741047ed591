"""Epsilon of `private_mean` over rounds, computed by the dp-accounting library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from fedpax.aggregators.clipping import check_positive
from fedpax.aggregators.gaussian_noise import check_at_least


def privacy_spent(
    *,
    noise_multiplier: float,
    num_rounds: int,
    delta: float,
    sampling_probability: float | None = None,
    cohort_size: int | None = None,
    num_clients: int | None = None,
    discrete: bool = False,
) -> float:
    """Compute the epsilon of (epsilon, delta)-differential privacy after some rounds.

    Sampled participants are better protected than those of every round (amplification by
    sampling). Say how cohorts are drawn; a shuffled pass over the population is neither of these:

    - Poisson: every participant joins each round independently, with `sampling_probability`.
      Neighbouring populations differ by one participant, added or removed.
    - Fixed size: each round draws `cohort_size` of `num_clients` participants, uniformly
      without replacement. Neighbouring populations differ in one participant, replaced by another.
      The sum then changes by up to `2 max_norm`, so that this epsilon is larger.
    - Neither: every participant joins every round. One participant is added or removed.

    Poisson sampling and no sampling are accounted by privacy loss distributions, a fixed size by
    the Renyi differential privacy bound of the reference. All are upper bounds.

    Args:
        noise_multiplier: z, the standard deviation of the noise of the sum over the clipping norm.
            With adaptive clipping, that of both sums together, as `private_mean` takes it.
        num_rounds: number of rounds, at least 1.
        delta: between 0 and 1, well below 1 over the population's size.
        sampling_probability: probability of joining a round. Default None: no Poisson sampling.
        cohort_size: number of participants of a round. Default None: no sampling of a fixed size.
        num_clients: number of clients to draw from; given with `cohort_size`.
        discrete: the noise is discrete Gaussian, as in `private_secure_mean`: accounted by
            concentrated differential privacy, without sampling. Default False: Gaussian noise.

    Returns:
        Epsilon; infinity if `noise_multiplier` is 0.

    Raises:
        ImportError: the dp-accounting library is not installed.
        TypeError: an argument is not a number.
        ValueError: an argument is out of range, or the two kinds of sampling are mixed, or either
            is given for discrete noise.

    Example:
        >>> epsilon = privacy_spent(
        ...     noise_multiplier=1.0, num_rounds=1000, delta=1e-6, sampling_probability=0.001)
        >>> round(epsilon, 2)
        0.19

    Reference:
        McMahan et al., Learning Differentially Private Recurrent Language Models,
        arXiv:1710.06963, section 3.
        Wang et al., Subsampled Renyi Differential Privacy and Analytical Moments Accountant,
        arXiv:1808.00087, theorem 27 (fixed size).
        Koskela et al., Computing Tight Differential Privacy Guarantees Using FFT,
        arXiv:1906.03049 (privacy loss distributions).
        Kairouz et al., arXiv:2102.06387, proposition 14 (discrete noise).
    """
    check_at_least("privacy_spent", "noise_multiplier", noise_multiplier, 0.0)
    mechanism = _mechanism(
        "privacy_spent",
        num_rounds,
        delta,
        sampling_probability,
        cohort_size,
        num_clients,
        discrete,
    )
    accountant = mechanism.make_accountant()
    accountant.compose(mechanism.make_event(noise_multiplier))
    return float(accountant.get_epsilon(delta))


def noise_multiplier_for(
    *,
    epsilon: float,
    num_rounds: int,
    delta: float,
    sampling_probability: float | None = None,
    cohort_size: int | None = None,
    num_clients: int | None = None,
    discrete: bool = False,
) -> float:
    """Find the smallest noise multiplier that spends at most epsilon: inverts `privacy_spent`.

    Args:
        epsilon: the budget, above 0.
        num_rounds: as in `privacy_spent`.
        delta: as in `privacy_spent`.
        sampling_probability: as in `privacy_spent`.
        cohort_size: as in `privacy_spent`.
        num_clients: as in `privacy_spent`.
        discrete: as in `privacy_spent`.

    Returns:
        The noise multiplier, at most 0.001 above the smallest one. With Poisson sampling, the
        search takes some seconds.

    Raises:
        ImportError: the dp-accounting library is not installed.
        TypeError: an argument is not a number.
        ValueError: as for `privacy_spent`, or no noise multiplier reaches epsilon: the accountants'
            bounds do not go to 0.

    Example:
        >>> noise_multiplier = noise_multiplier_for(epsilon=2.0, num_rounds=1, delta=1e-6)
        >>> round(noise_multiplier, 3)
        2.231
        >>> round(privacy_spent(noise_multiplier=noise_multiplier, num_rounds=1, delta=1e-6), 2)
        2.0

    Reference:
        As for `privacy_spent`.
    """
    check_positive("noise_multiplier_for", "epsilon", epsilon)
    mechanism = _mechanism(
        "noise_multiplier_for",
        num_rounds,
        delta,
        sampling_probability,
        cohort_size,
        num_clients,
        discrete,
    )
    dp = _import_dp_accounting()
    try:
        found = dp.calibrate_dp_mechanism(
            mechanism.make_accountant,
            mechanism.make_event,
            epsilon,
            delta,
            dp.LowerEndpointAndGuess(0.0, 1.0),
            tol=1e-3,
        )
    except dp.mechanism_calibration.NoBracketIntervalFoundError as error:
        raise ValueError(
            f"noise_multiplier_for(): no noise multiplier reaches epsilon={epsilon} with delta="
            f"{delta} in {num_rounds} rounds. Increase epsilon or delta, or run fewer rounds."
        ) from error
    return float(found)


class _Mechanism(NamedTuple):
    """Sampling of cohorts: its accountant, and the event of all rounds by their noise."""

    make_accountant: Callable[[], Any]
    make_event: Callable[[float], Any]


def _mechanism(
    function: str,
    num_rounds: int,
    delta: float,
    sampling_probability: float | None,
    cohort_size: int | None,
    num_clients: int | None,
    discrete: bool,
) -> _Mechanism:
    """Check the arguments that describe the rounds."""
    _check_int(function, "num_rounds", num_rounds)
    check_positive(function, "delta", delta)
    if delta >= 1:
        raise ValueError(
            f"{function}(): delta is {delta}, expected less than 1. Use well below 1 over the "
            "population's size, such as 1e-6."
        )
    dp = _import_dp_accounting()
    if discrete:
        if (sampling_probability, cohort_size, num_clients) != (None, None, None):
            raise ValueError(
                f"{function}(): discrete noise is accounted without sampling. Leave out "
                "sampling_probability, cohort_size and num_clients."
            )
        return _Mechanism(
            dp.rdp.RdpAccountant,
            _repeated(num_rounds, lambda noise: dp.ZCDpEvent(rho=1 / (2 * noise**2))),
        )
    if (cohort_size is None) != (num_clients is None):
        raise ValueError(
            f"{function}(): cohort_size is {cohort_size} and num_clients is {num_clients}, "
            "expected both, or neither. Pass both for cohorts of a fixed size."
        )
    if cohort_size is None or num_clients is None:
        probability = 1.0 if sampling_probability is None else sampling_probability
        check_positive(function, "sampling_probability", probability)
        if probability > 1:
            raise ValueError(
                f"{function}(): sampling_probability is {probability}, expected at most 1. Divide "
                "the expected size of a cohort by the population's size."
            )

        def poisson(noise_multiplier: float) -> Any:
            event = dp.GaussianDpEvent(noise_multiplier)
            return event if probability == 1 else dp.PoissonSampledDpEvent(probability, event)

        return _Mechanism(dp.pld.PLDAccountant, _repeated(num_rounds, poisson))
    if sampling_probability is not None:
        raise ValueError(
            f"{function}(): got sampling_probability, for Poisson sampling, and cohort_size, for "
            "cohorts of a fixed size. Pass the one by which cohorts are drawn."
        )
    _check_int(function, "cohort_size", cohort_size)
    _check_int(function, "num_clients", num_clients)
    if cohort_size > num_clients:
        raise ValueError(
            f"{function}(): cohort_size is {cohort_size}, expected at most num_clients = "
            f"{num_clients}. Cohorts are drawn without replacement."
        )

    def fixed_size(noise_multiplier: float) -> Any:
        # Replacing a participant changes the sum by up to twice the clipping norm.
        event = dp.GaussianDpEvent(noise_multiplier / 2)
        return dp.SampledWithoutReplacementDpEvent(num_clients, cohort_size, event)

    replace_one = dp.NeighboringRelation.REPLACE_ONE
    accountant = functools.partial(dp.rdp.RdpAccountant, neighboring_relation=replace_one)
    return _Mechanism(accountant, _repeated(num_rounds, fixed_size))


def _repeated(num_rounds: int, one_round: Callable[[float], Any]) -> Callable[[float], Any]:
    """Return the event of all rounds, by their noise multiplier."""
    dp = _import_dp_accounting()

    def all_rounds(noise_multiplier: float) -> Any:
        if noise_multiplier == 0:
            return dp.NonPrivateDpEvent()
        return dp.SelfComposedDpEvent(one_round(noise_multiplier), num_rounds)

    return all_rounds


def _check_int(function: str, argument: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{function}(): {argument} is {value!r}, expected an int.")
    if value < 1:
        raise ValueError(f"{function}(): {argument} is {value}, expected at least 1.")


def _import_dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "The epsilon of private_mean() is computed by the dp-accounting library, which is not "
            "installed. Install it: pip install 'fedpax[privacy]'."
        ) from error
    return dp_accounting
