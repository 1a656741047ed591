import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.data.populations.client_sampler import ClientSampler


@st.composite
def populations(draw):
    population = draw(st.integers(1, 200))
    return population, draw(st.integers(1, population))


@given(populations(), st.integers(0, 2**31), st.integers(0, 10**6), st.booleans())
def test_a_cohort_has_different_clients_of_the_population(sizes, seed, round_number, weighted):
    population, size = sizes
    weights = np.random.default_rng(seed).exponential(size=population) if weighted else None
    drawn = ClientSampler(population, size, seed, weights).draw(round_number)
    assert drawn.dtype == np.int64
    assert drawn.shape == (size,)
    assert len(set(drawn.tolist())) == size
    assert drawn.min() >= 0
    assert drawn.max() < population


@given(st.integers(0, 2**31), st.lists(st.integers(0, 1000), min_size=1, max_size=5))
def test_a_cohort_depends_on_seed_and_round_alone(seed, order):
    """Not on which rounds were drawn before, nor on the object that draws."""
    one = ClientSampler(50, 5, seed)
    drawn = {r: one.draw(r).tolist() for r in order}
    for r in reversed(order):
        assert ClientSampler(50, 5, seed).draw(r).tolist() == drawn[r]


def test_rounds_and_seeds_draw_different_cohorts():
    cohorts = {tuple(ClientSampler(1000, 10, s).draw(r)) for s in range(20) for r in range(20)}
    assert len(cohorts) == 400


def test_uniform_cohorts_draw_all_clients_and_pairs_alike():
    rounds = 1500
    cohorts = ClientSampler(6, 3, seed=3)
    counts = np.zeros((6, 6))
    for r in range(rounds):
        for pair in itertools.permutations(cohorts.draw(r), 2):
            counts[pair] += 1
    pairs = counts[~np.eye(6, dtype=bool)] / rounds  # each in 3 * 2 / (6 * 5) of all cohorts
    np.testing.assert_allclose(pairs, 0.2, atol=4 * np.sqrt(0.2 * 0.8 / rounds))


def test_weighted_cohorts_follow_successive_draws():
    """The chance of each ordered cohort of two is w_i / W * w_j / (W - w_i)."""
    weights = np.array([4.0, 0.0, 2.0, 1.0, 0.5])
    rounds = 10_000
    cohorts = ClientSampler(5, 2, seed=5, weights=weights)
    counts = np.zeros((5, 5))
    for r in range(rounds):
        counts[tuple(cohorts.draw(r))] += 1
    whole = weights.sum()
    for i, j in itertools.permutations(range(5), 2):
        chance = weights[i] / whole * weights[j] / (whole - weights[i])
        spread = np.sqrt(chance * (1 - chance) / rounds)
        assert abs(counts[i, j] / rounds - chance) <= 4.5 * spread


@pytest.mark.parametrize("largest", [1e-320, 1e308])
def test_tiny_weights_draw_in_their_proportion(largest):
    """In steps of 5e-324, and where the others are tiny beside the one that is always drawn."""
    weights = np.array([0.0, 1e-320, 1e-320, 2e-320])
    weights[0] = 0 if largest == 1e-320 else largest
    size = 1 if largest == 1e-320 else 2
    cohorts = ClientSampler(4, size, seed=1, weights=weights)
    counts = np.bincount([cohorts.draw(r)[-1] for r in range(2000)], minlength=4)
    np.testing.assert_allclose(counts / 2000, [0, 0.25, 0.25, 0.5], atol=0.05)


@pytest.mark.parametrize("weighted", [False, True])
def test_only_available_clients_are_drawn(weighted):
    rng = np.random.default_rng(0)
    masks = rng.random((30, 40)) < 0.3
    masks[:, 0] = True
    weights = rng.exponential(size=40) if weighted else None
    cohorts = ClientSampler(40, 8, weights=weights, available=lambda r: masks[r])
    for r in range(30):
        drawn = cohorts.draw(r)
        assert masks[r][drawn].all()
        assert len(set(drawn.tolist())) == min(8, masks[r].sum())


def test_a_large_population_costs_no_more_than_its_cohort():
    """10**12 clients, of which nothing is stored."""
    drawn = ClientSampler(10**12, 1000, seed=1).draw(5)
    assert len(set(drawn.tolist())) == 1000
    assert 0.4 < np.mean(drawn < 5 * 10**11) < 0.6


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"population": 10, "size": 0}, "take at least 1"),
        ({"population": 10, "size": 11}, "take 10 or fewer"),
        ({"population": 0, "size": 1}, "take 0 or fewer"),
        ({"population": 3, "size": 1, "weights": [1.0, 2.0]}, "each of the 3 clients"),
        ({"population": 2, "size": 1, "weights": [1.0, -2.0]}, "at least 0"),
        ({"population": 2, "size": 1, "weights": [1.0, np.nan]}, "finite"),
        ({"population": 3, "size": 2, "weights": [1.0, 0.0, 0.0]}, "take a smaller cohort"),
    ],
)
def test_bad_sizes_and_weights_are_told(arguments, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        ClientSampler(**arguments)


@pytest.mark.parametrize(
    ("available", "message"),
    [
        (lambda r: np.zeros(4, bool), "No client is available in round 7"),
        (lambda r: np.ones(3, bool), "bool[3], expected one boolean for each of the 4 clients"),
        (lambda r: np.ones(4), "float64[4], expected one boolean"),
    ],
)
def test_bad_availability_is_told(available, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ClientSampler(4, 2, available=available).draw(7)


@pytest.mark.parametrize(
    ("round_number", "error", "message"),
    [
        (-1, ValueError, "round -1: rounds count from 0"),
        (1.5, TypeError, "round 1.5, expected a whole number"),
        (None, TypeError, "round None, expected a whole number"),
    ],
)
def test_bad_rounds_are_told(round_number, error, message):
    with pytest.raises(error, match=message):
        ClientSampler(4, 2).draw(round_number)
