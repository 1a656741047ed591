import itertools
import re
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from fedpax.populations import client_sampler
from fedpax.populations.client_sampler import ClientSampler, poisson_cohort_size


@st.composite
def populations(draw):
    num_clients = draw(st.integers(1, 200))
    return num_clients, draw(st.integers(1, num_clients))


@given(populations(), st.integers(0, 2**31), st.integers(0, 10**6), st.booleans())
def test_a_cohort_has_distinct_clients_of_the_population(sizes, seed, round_number, weighted):
    num_clients, size = sizes
    weights = np.random.default_rng(seed).exponential(size=num_clients) if weighted else None
    sampled = ClientSampler(num_clients, size, seed, weights).sample(round_number)
    assert sampled.dtype == np.int64
    assert sampled.shape == (size,)
    assert len(set(sampled.tolist())) == size
    assert sampled.min() >= 0
    assert sampled.max() < num_clients


@given(st.integers(0, 2**31), st.lists(st.integers(0, 1000), min_size=1, max_size=5))
def test_a_cohort_depends_on_seed_and_round_alone(seed, order):
    """Not on the rounds sampled before, and not on the sampler object."""
    sampler = ClientSampler(50, 5, seed)
    sampled = {r: sampler.sample(r).tolist() for r in order}
    for r in reversed(order):
        assert ClientSampler(50, 5, seed).sample(r).tolist() == sampled[r]


def test_different_rounds_and_seeds_give_different_cohorts():
    cohorts = {tuple(ClientSampler(1000, 10, s).sample(r)) for s in range(20) for r in range(20)}
    assert len(cohorts) == 400


def test_uniform_sampling_gives_all_pairs_equal_probability():
    rounds = 1500
    cohorts = ClientSampler(6, 3, seed=3)
    counts = np.zeros((6, 6))
    for r in range(rounds):
        for pair in itertools.permutations(cohorts.sample(r), 2):
            counts[pair] += 1
    pairs = counts[~np.eye(6, dtype=bool)] / rounds  # each in 3 * 2 / (6 * 5) of all cohorts
    np.testing.assert_allclose(pairs, 0.2, atol=4 * np.sqrt(0.2 * 0.8 / rounds))


@pytest.mark.usefixtures("way")
def test_weighted_sampling_equals_successive_draws():
    """The probability of each ordered pair is w_i / W * w_j / (W - w_i)."""
    weights = np.concatenate([[4.0, 0.0, 2.0, 1.0, 0.5], np.zeros(12)])
    rounds = 10_000
    cohorts = ClientSampler(17, 2, seed=5, weights=weights)
    counts = np.zeros((17, 17))
    for r in range(rounds):
        counts[tuple(cohorts.sample(r))] += 1
    whole = weights.sum()
    for i, j in itertools.permutations(range(5), 2):
        probability = weights[i] / whole * weights[j] / (whole - weights[i])
        spread = np.sqrt(probability * (1 - probability) / rounds)
        assert abs(counts[i, j] / rounds - probability) <= 4.5 * spread


@pytest.fixture(params=["arrivals", "searches"])
def way(request, monkeypatch):
    """Draw by a random number for each client, and by a search for each draw."""
    if request.param == "searches":
        monkeypatch.setattr(client_sampler, "MOST_ARRIVALS", 0)


@given(populations(), st.integers(0, 2**31), st.floats(0, 100), st.booleans())
def test_searches_draw_distinct_clients_of_positive_weight(sizes, seed, spread, has_absent):
    num_clients, size = sizes
    rng = np.random.default_rng(seed)
    weights = np.exp(spread * rng.standard_normal(8 * num_clients + 1))
    weights[rng.choice(len(weights), len(weights) - 2 * size, replace=False)] = 0
    present = rng.random(len(weights)) < 0.5
    present[np.flatnonzero(weights)[0]] = True
    available = (lambda _: present) if has_absent else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_sampler, "MOST_ARRIVALS", 0)
        sampler = ClientSampler(len(weights), size, seed, weights, available)
    assert sampler.searches
    sampled = sampler.sample(3)
    can = (weights > 0) & present if has_absent else weights > 0
    assert can[sampled].all()
    assert len(set(sampled.tolist())) == len(sampled) == min(size, can.sum())
    assert sampler.sample(3).tolist() == sampled.tolist() and sampled.dtype == np.int64


def test_a_large_population_is_searched_and_a_small_one_has_the_draws_of_earlier_versions():
    weights = np.random.default_rng(0).exponential(size=client_sampler.MOST_ARRIVALS + 1)
    assert ClientSampler(len(weights), 10, weights=weights).searches
    assert not ClientSampler(len(weights), len(weights) // 2, weights=weights).searches
    small = ClientSampler(1000, 5, seed=3, weights=weights[:1000])
    assert small.sample(2).tolist() == [210, 764, 926, 924, 249]


def test_a_cohort_of_a_large_population_takes_few_draws():
    """Of a million clients: 10 us a draw would be seen, 1 s for all clients too."""
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=10**6)
    sampler = ClientSampler(10**6, 1000, weights=weights)
    with patch.object(client_sampler, "_uniform", wraps=client_sampler._uniform) as uniform:
        sampled = sampler.sample(0)
    assert sum(np.size(call.args[-1]) for call in uniform.call_args_list) < 1500
    assert weights[sampled].mean() == pytest.approx(2, rel=0.2)  # E[w**2] / E[w]


@pytest.mark.each_value
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("largest", [1e-320, 1e308])
def test_tiny_weights_are_sampled_in_proportion(largest):
    """With subnormal weights, alone and beside a huge one that is always sampled."""
    weights = np.array([0.0, 1e-320, 1e-320, 2e-320])
    weights[0] = 0 if largest == 1e-320 else largest
    size = 1 if largest == 1e-320 else 2
    cohorts = ClientSampler(17, size, seed=1, weights=np.pad(weights, (0, 13)))
    counts = np.bincount([cohorts.sample(r)[-1] for r in range(2000)], minlength=4)
    np.testing.assert_allclose(counts / 2000, [0, 0.25, 0.25, 0.5], atol=0.05)


@pytest.mark.parametrize("weighted", [False, True])
def test_only_available_clients_are_sampled(weighted):
    rng = np.random.default_rng(0)
    masks = rng.random((30, 40)) < 0.3
    masks[:, 0] = True
    weights = rng.exponential(size=40) if weighted else None
    cohorts = ClientSampler(40, 8, weights=weights, available=lambda r: masks[r])
    for r in range(30):
        sampled = cohorts.sample(r)
        assert masks[r][sampled].all()
        assert len(set(sampled.tolist())) == min(8, masks[r].sum())


def test_sampling_from_a_huge_population_needs_no_memory_per_client():
    """10**12 clients."""
    sampled = ClientSampler(10**12, 1000, seed=1).sample(5)
    assert len(set(sampled.tolist())) == 1000
    assert 0.4 < np.mean(sampled < 5 * 10**11) < 0.6


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"num_clients": 10, "cohort_size": 0}, "cohort_size is 0, expected at least 1"),
        ({"num_clients": 10, "cohort_size": 11}, "take 10 or fewer"),
        ({"num_clients": 10, "cohort_size": 11}, "In an experiment of fedpax, set --cohort.size."),
        ({"num_clients": 0, "cohort_size": 1}, "take 0 or fewer"),
        ({"num_clients": 3, "cohort_size": 1, "weights": [1.0, 2.0]}, "each of the 3 clients"),
        (
            {"num_clients": 2, "cohort_size": 1, "weights": [1.0, -2.0]},
            "weights[1], of client 1, is -2",
        ),
        (
            {"num_clients": 2, "cohort_size": 1, "weights": [1.0, np.nan]},
            "is nan, expected a finite",
        ),
        ({"num_clients": 3, "cohort_size": 2, "weights": [1.0, 0.0, 0.0]}, "reduce cohort_size"),
    ],
)
def test_bad_sizes_and_weights_raise(arguments, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        ClientSampler(**arguments)


@pytest.mark.parametrize(
    ("available", "message"),
    [
        (
            lambda r: np.zeros(4, bool),
            "No client is available in round 7: a round needs at least one. Raise the fraction of "
            "DailyAvailability, or let `available` return True for at least one client.",
        ),
        (lambda r: np.ones(3, bool), "bool[3], expected one boolean for each of the 4 clients"),
        (lambda r: np.ones(4), "float64[4], expected one boolean"),
    ],
)
def test_bad_availability_raises(available, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ClientSampler(4, 2, available=available).sample(7)


@pytest.mark.parametrize(
    ("round_number", "error", "message"),
    [
        (-1, ValueError, "round_number is -1: rounds count from 0"),
        (1.5, TypeError, "round_number is 1.5, expected an integer"),
        (None, TypeError, "round_number is None, expected an integer"),
    ],
)
def test_bad_round_numbers_raise(round_number, error, message):
    with pytest.raises(error, match=message):
        ClientSampler(4, 2).sample(round_number)


@given(
    st.integers(1, 60),
    st.floats(0.0, 1.0, exclude_min=True),
    st.integers(0, 2**31),
    st.integers(0, 10**6),
)
def test_a_poisson_cohort_has_distinct_clients_and_depends_on_seed_and_round_alone(
    num_clients, probability, seed, round_number
):
    make = lambda: ClientSampler(num_clients, num_clients, seed, sampling_probability=probability)
    sampled = make().sample(round_number)
    assert sampled.dtype == np.int64
    assert len(set(sampled.tolist())) == len(sampled)
    assert set(sampled.tolist()) <= set(range(num_clients))
    again = make()
    again.sample(round_number + 1)
    assert again.sample(round_number).tolist() == sampled.tolist()
    if probability == 1:
        assert len(sampled) == num_clients


@pytest.mark.parametrize("probability", [0.1, 0.7])
def test_poisson_sampling_is_independent_between_clients_and_rounds(probability):
    clients, rounds = 8, 1500
    sampler = ClientSampler(clients, clients, seed=2, sampling_probability=probability)
    joined = np.zeros((rounds, clients))
    for r in range(rounds):
        joined[r, sampler.sample(r)] = 1
    variance = probability * (1 - probability)
    mean = joined.mean(0)
    assert np.abs(mean - probability).max() < 4.5 * np.sqrt(variance / rounds)
    centered = joined - probability
    within = centered.T @ centered / rounds  # pairs of clients in a round
    between = centered[1:].T @ centered[:-1] / (rounds - 1)  # and in two consecutive rounds
    limit = 4.5 * variance / np.sqrt(rounds)
    assert np.abs(within[~np.eye(clients, dtype=bool)]).max() < limit
    assert np.abs(between).max() < limit
    # The number of clients is binomial.
    counts = joined.sum(1)
    assert abs(counts.var() / (clients * variance) - 1) < 4.5 * np.sqrt(2 / rounds)
    empty = (1 - probability) ** clients
    assert abs(np.mean(counts == 0) - empty) < 4.5 * np.sqrt(empty * (1 - empty) / rounds) + 1e-9


def test_poisson_cohorts_are_in_random_order_and_differ_between_seeds():
    make = lambda seed: ClientSampler(1000, 200, seed, sampling_probability=0.1).sample(0)
    assert len({tuple(sorted(make(seed))) for seed in range(20)}) == 20
    assert make(0).tolist() != sorted(make(0))


def test_only_available_clients_join_a_poisson_round():
    sampler = ClientSampler(20, 20, available=lambda r: np.arange(20) < r, sampling_probability=0.5)
    everyone = ClientSampler(20, 20, sampling_probability=0.5)
    for r in range(21):
        expected = [k for k in sorted(everyone.sample(r)) if k < r]
        assert sorted(sampler.sample(r)) == expected  # in round 0, none


def test_poisson_sampling_from_a_huge_population_takes_time_in_proportion_to_the_cohort():
    sampler = ClientSampler(10**12, 2000, seed=1, sampling_probability=1e-9)
    sampled = sampler.sample(5)
    assert abs(len(sampled) - 1000) < 5 * np.sqrt(1000)
    assert 0.4 < np.mean(sampled < 5 * 10**11) < 0.6


def test_a_poisson_draw_that_is_too_large_raises():
    sampler = ClientSampler(100, 10, sampling_probability=0.1)
    sizes = [len(ClientSampler(100, 35, sampling_probability=0.1).sample(r)) for r in range(20)]
    assert max(sizes) > 10 >= min(sizes)
    for r, size in enumerate(sizes):
        if size <= 10:
            assert len(sampler.sample(r)) == size
            continue
        message = (
            f"{size} clients join round {r}, but cohort_size is 10. A round of all 100 clients "
            "with sampling_probability=0.1 has 10 on average, with standard deviation 3. Take a "
            "cohort_size from 34, which a round in a billion exceeds, to 100. On several devices, "
            "take a multiple of their number. In an experiment of fedpax, set --cohort.size."
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            sampler.sample(r)


@pytest.mark.parametrize("probability", [1e-6, 1e-3, 0.1, 0.5, 0.99, 1.0])
def test_one_poisson_round_in_a_billion_exceeds_the_suggested_size(probability):
    sizes = np.array([1, 7, 100, 10**4, 10**7])
    suggested = np.array([poisson_cohort_size(int(n), probability) for n in sizes])
    assert (suggested <= sizes).all()
    assert binom.sf(suggested, sizes, probability).max() < 1e-9


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"sampling_probability": 0.0}, "sampling_probability is 0.0, expected a number above 0"),
        ({"sampling_probability": 1.5}, "the expected size of a cohort divided by the number"),
        ({"sampling_probability": np.nan}, "sampling_probability is nan"),
        ({"sampling_probability": 0.2, "weights": np.ones(100)}, "Leave weights out"),
        ({"sampling_probability": 0.2}, "has 20 clients on average"),
        ({"sampling_probability": 0.2}, "Take a cohort_size from 50, which a round in a billion"),
        (
            {"sampling_probability": 0.2},
            "a multiple of their number. In an experiment of fedpax, set",
        ),
        (
            {"sampling_probability": 0.9},
            "cohort_size=100, all clients. In an experiment of fedpax, set",
        ),
        ({"sampling_probability": 0.2}, "Or reduce sampling_probability (--cohort.sampling_prob"),
    ],
)
def test_bad_settings_of_poisson_sampling_raise(changes, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        ClientSampler(100, 10, **changes)


@pytest.mark.parametrize("weights", [np.ones(3, complex), np.ones(3, "m8[s]"), ["1", "2", "3"]])
def test_weights_that_are_not_real_numbers_are_named(weights):
    with pytest.raises(TypeError, match=r"weights has dtype .*, expected"):
        ClientSampler(3, 1, weights=weights)
