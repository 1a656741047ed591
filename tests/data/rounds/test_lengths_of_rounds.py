"""Lengths of rounds: their padding, and the memory that they take."""

import functools
import os

import numpy as np
import pytest
from cohort_problem import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.data.rounds.cohort_rounds import cohort_rounds
from fedpax.data.rounds.cohort_stream import MOSTLY_PADDING, shorter_lengths
from fedpax.populations.client_arrays import ContiguousClients
from fedpax.populations.client_sampler import ClientSampler


def test_two_rounds_have_to_fit_the_memory() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    x = np.zeros(100, np.float32)
    population, sampler = [np.array([k]) for k in range(100)], ClientSampler(100, 100)
    make = functools.partial(cohort_rounds, {"x": x}, population, sampler, preprocess=dict)
    make(batch_size=int(0.4 * memory / 400))
    match = r"One round of cohort_size=100 x max_steps=1 x .*the next one is read meanwhile"
    with pytest.raises(ValueError, match=match):
        make(batch_size=int(0.7 * memory / 400))


@given(st.integers(0, 100), st.integers(1, 2), st.sampled_from([None, 9, 40]))
@settings(max_examples=20, deadline=None)
def test_rounds_without_the_largest_clients_are_short(seed, local_epochs, max_steps):
    sizes = np.random.default_rng(seed).choice([0, 1, 2, 3, 5, 9, 30, 120], 12)
    sizes[0] = 120
    examples, population = problem(sizes, seed)
    sampler = ClientSampler(len(sizes), 3, seed)
    arguments = {"batch_size": 2, "local_epochs": local_epochs, "max_steps": max_steps}
    short, whole = (
        cohort_rounds(examples, population, sampler, pad_to=pad_to, **arguments)
        for pad_to in ("round", "population")
    )
    assert short.shapes == whole.shapes and short.settings == whole.settings
    for _ in range(6):
        a, b = next(short), next(whole)
        length, most = a.batches["mask"].shape[1], whole.max_steps
        assert b.batches["mask"].shape[1] == most
        assert length in [-(-most // 4**k) for k in range(9)] or length == 1
        assert length == most or a.num_steps.max() <= length < 4 * max(1, a.num_steps.max())
        for x, y in zip(a[1:], b[1:], strict=True):
            np.testing.assert_array_equal(x, y)
        is_step = np.arange(most) < b.num_steps[:, None]
        for name, values in a.batches.items():
            np.testing.assert_array_equal(values[is_step[:, :length]], b.batches[name][is_step])
            if 0 < MOSTLY_PADDING * is_step.sum() < is_step.size:
                assert not b.batches[name][~is_step].any()
        assert not b.batches["mask"][~is_step].any()  # also of a round of clients without examples


def test_padding_is_not_read(monkeypatch):
    x = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    population = [np.arange(990), *np.arange(990, 1000)[:, None]]
    counts = []

    def count(fields):
        counts.append(len(fields["x"]))
        return fields

    rounds = cohort_rounds(
        {"x": x}, population, ClientSampler(11, 11), batch_size=10, preprocess=count
    )
    cohort = next(rounds)
    assert counts == [1, (99 + 10) * 10] and cohort.batches["x"].shape == (11, 99, 10, 3)
    assert cohort.batches["x"].ctypes.data % 64 == 0  # JAX need not copy it


def test_a_round_takes_the_memory_of_its_clients_alone():
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_bytes = memory // (1000 * 20)  # of an example: 20 clients of 1,000 examples fit
    sizes = np.array([1000, *[2] * 500])
    make = functools.partial(
        cohort_rounds,
        {"x": np.zeros(12000, np.uint8)},
        batch_size=1,
        preprocess=lambda fields: {
            "x": np.broadcast_to(np.uint8(3), (len(fields["x"]), num_bytes))
        },
    )
    population = ContiguousClients(np.append(0, np.cumsum(sizes)))
    assert make(population, ClientSampler(501, 10)).max_steps == 1000
    few = r"max_steps=1000 x .*largest client has 1,000 examples. Reduce the cohort, or pass "
    few += (
        r"max_steps=400 \(--cohort.max_steps=400\): 1 of 501 clients then leave out 600 of 2,000 "
    )
    with pytest.raises(ValueError, match=few):
        make(population, ClientSampler(501, 25))
    equal = ContiguousClients(np.arange(0, 12001, 1000))
    with pytest.raises(ValueError, match=r"the next one is read meanwhile.*max_steps"):
        make(equal, ClientSampler(12, 12))


def test_pad_to_is_one_of_two_words():
    with pytest.raises(ValueError, match="pad_to is 'cohort', expected 'population' or 'round'"):
        cohort_rounds(
            {"x": np.ones(2)}, [[0, 1]], ClientSampler(1, 1), batch_size=1, pad_to="cohort"
        )


def test_a_shorter_length_is_a_fourth() -> None:
    assert shorter_lengths(50) == [50, 13, 4, 1]
