"""Epsilon: against closed forms, the literature's figures, and the dp-accounting library."""

import math
import sys

import pytest

from fedpax.aggregators import noise_multiplier_for, privacy_spent

dp_accounting = pytest.importorskip("dp_accounting")


def gaussian_delta(epsilon, sigma):
    """The exact delta of the Gaussian mechanism (Balle and Wang, arXiv:1805.06530, theorem 8)."""

    def cdf(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    a, b = 1 / (2 * sigma), epsilon * sigma
    return cdf(a - b) - math.exp(epsilon) * cdf(-a - b)


@pytest.mark.parametrize(("sigma", "rounds"), [(1.0, 1), (3.0, 1), (8.0, 16)])
def test_without_sampling_it_is_the_gaussian_mechanism(sigma, rounds):
    """k rounds with sigma are one with sigma / sqrt(k)."""
    epsilon = privacy_spent(noise_multiplier=sigma, num_rounds=rounds, delta=1e-5)
    delta = gaussian_delta(epsilon, sigma / math.sqrt(rounds))
    assert 0.97e-5 < delta <= 1e-5


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
def test_fixed_size_cohorts_are_those_of_the_library():
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
    assert exact < all_of_them < 1.3 * exact


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
        ({"epsilon": 0.0}, ValueError, "epsilon is 0, expected a positive number"),
        ({"epsilon": -1.0}, ValueError, "epsilon is -1.0, expected"),
        ({"epsilon": math.inf}, ValueError, "epsilon is inf, expected a finite number"),
        (
            {"epsilon": 1e-12, "delta": 1e-20},
            ValueError,
            r"no noise multiplier reaches epsilon=1e-12 .* Increase epsilon or delta",
        ),
        ({"delta": 0.0}, ValueError, "delta is 0, expected a positive number"),
        ({"delta": 1.0}, ValueError, "delta is 1.0, expected less than 1. Use well below"),
        ({"num_rounds": 0}, ValueError, "num_rounds is 0, expected at least 1"),
        ({"num_rounds": 1.5}, TypeError, "num_rounds is 1.5, expected an int"),
        ({"sampling_probability": 1.5}, ValueError, "is 1.5, expected at most 1. Divide"),
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


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install 'fedpax\[privacy\]'"):
        privacy_spent(noise_multiplier=1.0, num_rounds=1, delta=1e-6)
