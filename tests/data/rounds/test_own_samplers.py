"""Tests of cohorts of samplers that users write."""

import re

import numpy as np
import pytest
from cohort_problem import problem

from fedpax.data.rounds.cohort_rounds import cohort_rounds
from fedpax.populations.client_sampler import ClientSampler


class Returns(ClientSampler):
    """A sampler of one's own."""

    clients = ()

    def sample(self, round_number):
        del round_number
        return np.asarray(self.clients)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([0, 1, 2, 3], "int64[4], expected the clients of the round: at most cohort_size=3"),
        ([0, 5], "integers from 0 to 4. Return fewer clients"),
        ([0, -1], "integers from 0 to 4"),
        ([0.5], "float64[1]"),
        (2, "int64[]"),
        ([1, 3, 1], "a cohort that has the client 1 more than once"),
    ],
)
def test_a_subclass_that_samples_other_than_clients_raises(clients, words):
    examples, population = problem([1] * 5)
    sampler = Returns(5, 3)
    object.__setattr__(sampler, "clients", clients)
    with pytest.raises(ValueError, match=r"Returns\.sample\(0\) returned .*" + re.escape(words)):
        next(cohort_rounds(examples, population, sampler, batch_size=1))


def test_a_subclass_that_says_so_may_draw_a_client_twice():
    class Repeats(Returns):
        repeats = True

    examples, population = problem([1, 2, 3, 4, 5])
    sampler = Repeats(5, 3)
    object.__setattr__(sampler, "clients", [4, 3, 4])
    cohort = next(cohort_rounds(examples, population, sampler, batch_size=1))
    assert sorted(cohort.client_ids) == [3, 4, 4]
    assert sorted(cohort.num_examples) == [4, 5, 5]


def test_a_subclass_may_sample_no_client():
    examples, population = problem([1] * 5)
    cohort = next(cohort_rounds(examples, population, Returns(5, 3), batch_size=1))
    assert (cohort.client_ids == -1).all()


def test_a_sampler_that_is_no_client_sampler_raises():
    class Own:
        num_clients, cohort_size, seed = 5, 3, 0

    examples, population = problem([1] * 5)
    with pytest.raises(TypeError, match=r"sampler is a Own, .* subclass ClientSampler"):
        cohort_rounds(examples, population, Own(), batch_size=1)
