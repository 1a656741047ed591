"""Epsilon: against closed forms, the literature's figures, and the dp-accounting library."""

import functools
import math
import resource
import sys
import time
from types import ModuleType

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from fedpax.aggregators import (
    PrivacyAccountant,
    noise_multiplier_for,
    privacy_spent,
    private_mean,
)

FIXED = {"cohort_size": 5, "num_clients": 1000}


@pytest.fixture(autouse=True, scope="module")
def dp_accounting() -> ModuleType:
    """Import the library in the worker that runs these tests: it loads much of SciPy."""
    return pytest.importorskip("dp_accounting")


def gaussian_delta(epsilon, sigma):
    """The exact delta of the Gaussian mechanism (Balle and Wang, arXiv:1805.06530, theorem 8)."""
    a, b = 1 / (2 * sigma), epsilon * sigma
    return norm.cdf(a - b) - math.exp(epsilon + norm.logcdf(-a - b))


@hypothesis.given(
    sigma=st.floats(0.05, 1e4), rounds=st.integers(1, 10**5), delta=st.floats(1e-14, 0.9)
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_without_sampling_it_is_the_gaussian_mechanism(dp_accounting, sigma, rounds, delta):
    """k rounds with sigma are one with sigma / sqrt(k)."""
    together = sigma / math.sqrt(rounds)
    hypothesis.assume(together > 0.01)  # of more noise the library takes differences of 1e-16
    epsilon = privacy_spent(noise_multiplier=sigma, num_rounds=rounds, delta=delta)
    low, high = 0.0, 0.5 / together**2 + 40 / together
    if gaussian_delta(0.0, together) <= delta:
        high = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if gaussian_delta(middle, together) > delta:
            low = middle
        else:
            high = middle
    assert epsilon == pytest.approx(high, rel=1e-6, abs=1e-6)
    library = dp_accounting.get_epsilon_gaussian(together, delta)
    assert epsilon == pytest.approx(library, rel=1e-6, abs=1e-6)
    assert PrivacyAccountant(sigma, delta).epsilon(rounds) == epsilon


def test_the_metric_of_all_clients_is_exact(dp_accounting):
    made = private_mean(max_norm=1.0, noise_multiplier=0.7, seed=0, delta=1e-5)
    assert made.accountant is not None
    epsilon, bound = made.accountant.epsilon(60), made.accountant._replace(discrete=True)
    assert epsilon == pytest.approx(dp_accounting.get_epsilon_gaussian(0.7 / 60**0.5, 1e-5))
    assert epsilon < 0.97 * bound.epsilon(60)


@pytest.mark.parametrize(
    ("sampling", "noise", "rounds", "delta", "published"),
    [
        # TensorFlow Privacy's MNIST tutorial: 60000 examples, batches of 256.
        pytest.param(256 / 60000, 1.3, 15 * 60000 // 256, 1e-5, 1.19, marks=pytest.mark.slow),
        (256 / 60000, 1.1, 60 * 60000 // 256, 1e-5, 3.01),
        pytest.param(256 / 60000, 0.7, 45 * 60000 // 256, 1e-5, 7.10, marks=pytest.mark.slow),
        # DP-FedAvg, arXiv:1710.06963: 763,430 users, 5,000 expected per round.
        (5000 / 763430, 1.0, 4980, 1e-9, 4.634),
    ],
)
def test_poisson_sampling_is_as_private_as_published_and_tighter(
    sampling, noise, rounds, delta, published
):
    """The published figures are of the moments accountant, an upper bound that is 20-35% larger."""
    epsilon = privacy_spent(
        noise_multiplier=noise, num_rounds=rounds, delta=delta, sampling_probability=sampling
    )
    assert 0.7 * published < epsilon < published


@pytest.mark.slow
def test_fixed_size_cohorts_are_those_of_the_library(dp_accounting):
    arguments = {"num_rounds": 100, "delta": 1e-6, "cohort_size": 50, "num_clients": 5000}
    epsilon = privacy_spent(noise_multiplier=2.0, **arguments)
    accountant = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    gaussian = dp_accounting.GaussianDpEvent(1.0)  # a replaced participant moves the sum by 2 C
    event = dp_accounting.SampledWithoutReplacementDpEvent(5000, 50, gaussian)
    accountant.compose(event, 100)
    assert epsilon == pytest.approx(accountant.get_epsilon(1e-6))
    # A larger bound than for a participant added or removed by Poisson sampling.
    poisson = privacy_spent(
        noise_multiplier=2.0, num_rounds=100, delta=1e-6, sampling_probability=0.01
    )
    assert poisson < epsilon
    # All participants in each round: the Gaussian mechanism with twice the sensitivity.
    all_of_them = privacy_spent(
        noise_multiplier=2.0, num_rounds=1, delta=1e-6, cohort_size=9, num_clients=9
    )
    exact = privacy_spent(noise_multiplier=1.0, num_rounds=1, delta=1e-6)
    assert exact == pytest.approx(all_of_them)


@pytest.mark.parametrize(
    ("sampling", "alike"),
    [({"sampling_probability": 0.01}, 1.0), ({"cohort_size": 10, "num_clients": 1000}, 0.5)],
)
def test_releases_before_the_rounds_are_composed_without_sampling(dp_accounting, sampling, alike):
    """The release of all clients dominates; sampled rounds add the little that they add."""
    noise, arguments = 4.0, {"num_rounds": 20, "delta": 1e-5}
    spent = functools.partial(privacy_spent, noise_multiplier=noise, **arguments, **sampling)
    none, one, two = (spent(releases_before=k) for k in range(3))
    release = gaussian_delta(one, noise * alike)  # of the release alone
    assert 0 < release < 1e-5
    assert none < one < two
    unsampled = privacy_spent(noise_multiplier=noise * alike, num_rounds=21, delta=1e-5)
    assert one < unsampled
    relation = dp_accounting.NeighboringRelation
    accountant = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=relation.REPLACE_ONE if alike < 1 else relation.ADD_OR_REMOVE_ONE
    )
    gaussian = dp_accounting.GaussianDpEvent(noise * alike)
    rounds = (
        dp_accounting.PoissonSampledDpEvent(0.01, gaussian)
        if alike == 1
        else dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, gaussian)
    )
    accountant.compose(rounds, 20).compose(gaussian)
    bound = accountant.get_epsilon(1e-5)  # the moments of a Poisson sample are looser than losses
    assert 0.75 * bound < one <= bound * (1 + 1e-9)


def test_releases_before_count_as_rounds_without_sampling():
    for sampling in ({}, {"discrete": True}, {"sampling_probability": 1.0}):
        arguments = {"noise_multiplier": 3.0, "delta": 1e-5} | sampling
        together = privacy_spent(num_rounds=12, **arguments)
        apart = privacy_spent(num_rounds=10, releases_before=2, **arguments)
        assert apart == pytest.approx(together)


@pytest.mark.slow
def test_epsilon_falls_with_noise_and_rises_with_rounds_and_sampling():
    def spent(noise_multiplier=2.0, num_rounds=10, sampling_probability=0.1):
        return privacy_spent(
            noise_multiplier=noise_multiplier,
            num_rounds=num_rounds,
            delta=1e-6,
            sampling_probability=sampling_probability,
        )

    base = spent()
    assert spent(4.0) < base < spent(num_rounds=20)
    assert spent(sampling_probability=0.01) < base < spent(sampling_probability=1.0)
    assert spent(0.0) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"sampling_probability": 0.05},
        {"cohort_size": 50, "num_clients": 1000},
    ],
)
def test_the_noise_multiplier_is_the_smallest_that_keeps_the_budget(sampling):
    arguments = {"num_rounds": 10, "delta": 1e-5, **sampling}
    noise = noise_multiplier_for(epsilon=2.0, **arguments)
    assert privacy_spent(noise_multiplier=noise, **arguments) <= 2.0
    assert privacy_spent(noise_multiplier=noise - 2e-3, **arguments) > 2.0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon is 0.0, expected a positive finite number. Use"),
        ({"epsilon": -1.0}, ValueError, "epsilon is -1.0, expected"),
        ({"epsilon": math.inf}, ValueError, "epsilon is inf, expected a positive finite number"),
        (
            {"epsilon": 1e-12, "delta": 1e-20},
            ValueError,
            r"no noise multiplier up to .* reaches epsilon=1e-12 .* Increase epsilon or delta",
        ),
        ({"delta": 0.0}, ValueError, "delta is 0.0, expected .* above 0 and below 1. Use well"),
        ({"delta": 1.0}, ValueError, "delta is 1.0, expected .* below 1. Use well below"),
        ({"num_rounds": 0}, ValueError, "num_rounds is 0, expected an int of at least 1. Use"),
        ({"releases_before": -1}, ValueError, "releases_before is -1, expected .* Use 0 if"),
        ({"num_rounds": 1.5}, TypeError, "num_rounds is 1.5, expected an int"),
        ({"sampling_probability": 1.5}, ValueError, "is 1.5, expected .* at most 1. Divide"),
        ({"cohort_size": 5}, ValueError, "num_clients is None, expected both"),
        (
            {"cohort_size": 5, "num_clients": 4},
            ValueError,
            "cohort_size is 5, expected at most num_clients = 4",
        ),
        (
            {"cohort_size": 5, "num_clients": 9, "sampling_probability": 0.5},
            ValueError,
            "Pass the one by which cohorts are drawn",
        ),
    ],
)
def test_bad_input_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        noise_multiplier_for(**{"epsilon": 1.0, "num_rounds": 1, "delta": 1e-6} | arguments)


@pytest.mark.parametrize(
    ("arguments", "least", "most"),
    [
        # Without sampling: the closed form. With it: between it and the whole epsilon.
        ({"noise_multiplier": 1e-3, "num_rounds": 1}, 504_752, 504_753),
        ({"noise_multiplier": 0.1, "num_rounds": 60, "delta": 1e-3}, 3238.3, 3238.4),
        ({"noise_multiplier": 1e-160, "num_rounds": 1}, math.inf, math.inf),
        ({"noise_multiplier": 1e-3, "num_rounds": 60, "sampling_probability": 0.5}, 3e7, 3.1e7),
        ({"noise_multiplier": 1e-160, "num_rounds": 1, "sampling_probability": 0.5}, 1e9, math.inf),
        # With the finest grid these are 228.1748, 910.4345 and 0, after 5 s, 24 s and 93 s.
        (
            {"noise_multiplier": 1.0, "num_rounds": 1000, "sampling_probability": 0.5},
            228.174,
            228.2,
        ),
        ({"noise_multiplier": 0.2, "num_rounds": 100, "sampling_probability": 0.5}, 910.43, 910.5),
        ({"noise_multiplier": 0.05, "num_rounds": 10, "sampling_probability": 1e-9}, 0.0, 0.0),
        ({"noise_multiplier": 1e-160, "num_rounds": 1} | FIXED, math.inf, math.inf),
    ],
)
def test_little_noise_takes_little_time_and_memory(arguments, least, most):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    epsilon = privacy_spent(**{"delta": 1e-6} | arguments)
    assert least <= epsilon <= most
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # 1 GiB


@pytest.mark.parametrize("rounds", [1, 100])
@pytest.mark.parametrize("epsilon", [0.1, 2.0, 100.0])
def test_without_sampling_the_noise_multiplier_is_found_at_once(dp_accounting, epsilon, rounds):
    start = time.process_time()
    noise = noise_multiplier_for(epsilon=epsilon, num_rounds=rounds, delta=1e-6)
    smallest = math.sqrt(rounds) * dp_accounting.get_sigma_gaussian(epsilon, 1e-6)
    assert smallest <= noise <= smallest + 1e-3
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ""),
        ({"discrete": True}, ""),
        ({"sampling_probability": 0.5}, ", or take a smaller sampling_probability"),
        pytest.param(FIXED, ", or take a smaller cohort_size", marks=pytest.mark.slow),
    ],
)
def test_an_epsilon_that_nothing_reaches_is_refused(arguments, words):
    words = rf"up to 1e\+09 reaches .* Increase epsilon or delta, or run fewer rounds{words}.$"
    with pytest.raises(ValueError, match=words):
        noise_multiplier_for(epsilon=1e-10, num_rounds=100, delta=1e-20, **arguments)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install 'fedpax\[privacy\]'"):
        privacy_spent(noise_multiplier=1.0, num_rounds=1, delta=1e-6, sampling_probability=0.5)
    assert privacy_spent(noise_multiplier=1.0, num_rounds=1, delta=1e-6) > 4
    assert privacy_spent(noise_multiplier=1.0, num_rounds=1, delta=1e-6, discrete=True) > 4


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"sampling_probability": 1.5}, "sampling_probability is 1.5, expected"),
        ({"cohort_size": 5, "num_clients": 4}, "cohort_size is 5, expected at most"),
    ],
)
def test_arguments_are_checked_without_the_library(monkeypatch, sampling, words):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ValueError, match=words):
        privacy_spent(noise_multiplier=1.0, num_rounds=1, delta=1e-6, **sampling)
    with pytest.raises(ValueError, match=words):
        noise_multiplier_for(epsilon=1.0, num_rounds=1, delta=1e-6, **sampling)


@pytest.mark.parametrize("noise", [1e-12, 1e-8, 1e-5, 1e-3, 1.0, 100.0, 1e4])
def test_discrete_noise_has_the_bound_of_concentrated_privacy(noise):
    accountant, rounds = PrivacyAccountant(noise, delta=1e-6, discrete=True), 3
    rho, log_delta = rounds * 0.5 / noise**2, np.log(1e-6)
    beyond = np.sqrt(-log_delta / rho) * np.logspace(-1, 1, 2001)  # a - 1
    bounds = rho * (1 + beyond) - np.log1p(1 / beyond) - (log_delta + np.log1p(beyond)) / beyond
    assert accountant.epsilon(rounds) == pytest.approx(bounds.min(), rel=1e-3)
    traced = jax.jit(accountant.epsilon)(jnp.int32(rounds))
    assert float(traced) == pytest.approx(accountant.epsilon(rounds), rel=1e-6)


@pytest.mark.parametrize("noise", [1e-14, 1e-8, 1e-3, 0.3, 2.0, 20.0, 1e3, 1e4, 1e9])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.1])
def test_epsilon_in_a_program_is_the_same(noise, delta):
    accountant = PrivacyAccountant(noise, delta)
    epsilon, traced = accountant.epsilon(3), jax.jit(accountant.epsilon)(jnp.int32(3))
    assert 0 <= epsilon < np.inf and float(traced) == pytest.approx(epsilon, rel=1e-5, abs=1e-9)
    if noise < 1e-2:  # the larger terms of theorem 8 for little noise
        quantile = -norm.ppf(delta)
        assert epsilon == pytest.approx(1.5 / noise**2 + quantile * math.sqrt(3) / noise, rel=1e-4)


@pytest.mark.parametrize("noise", [0, 1e-16, 1e-200])
def test_without_noise_epsilon_is_infinite(noise):
    accountant = PrivacyAccountant(noise, delta=1e-6)
    assert accountant.epsilon(1) == np.inf == jax.jit(accountant.epsilon)(jnp.int32(1))
