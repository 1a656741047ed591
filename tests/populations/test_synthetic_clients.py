import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.data import ClientSampler, cohort_rounds
from fedpax.populations.synthetic_clients import DirichletClients

LABELS = np.random.default_rng(0).choice(5, p=[0.4, 0.3, 0.15, 0.1, 0.05], size=600) * 3


@given(st.floats(1e-4, 1e3), st.integers(0, 2**40), st.integers(0, 999))
def test_a_client_depends_on_the_arguments_and_its_index_alone(alpha, seed, client):
    made = lambda: DirichletClients(
        LABELS, 1000, alpha=alpha, median_examples=20, sigma=1.0, max_examples=50, seed=seed
    )
    clients = made()
    own = clients[client]
    np.testing.assert_array_equal(own, made()[client])
    assert own.dtype == np.int64
    assert 1 <= len(own) <= 50
    assert own.min() >= 0
    assert own.max() < len(LABELS)
    assert str(clients) == str(made())


def frequencies(clients, count=400):
    return np.stack(
        [np.bincount(LABELS[clients[k]] // 3, minlength=5) / len(clients[k]) for k in range(count)]
    )


def test_with_a_large_alpha_labels_are_distributed_as_in_the_pool():
    clients = DirichletClients(LABELS, 400, alpha=1e6, median_examples=500)
    pool = np.bincount(LABELS // 3) / len(LABELS)
    np.testing.assert_allclose(frequencies(clients).mean(0), pool, atol=0.01)
    assert np.abs(frequencies(clients) - pool).max() < 0.12


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_label_frequencies_have_the_moments_of_a_dirichlet_distribution(alpha):
    """Variance m (1 - m) / (sum a + 1) for concentrations a, and the variance of a sample."""
    clients = DirichletClients(LABELS, 2000, alpha=alpha, median_examples=400)
    result = frequencies(clients, 2000)
    mean = np.bincount(LABELS // 3) / len(LABELS)
    total = alpha * 5
    variance = mean * (1 - mean) / (total + 1) * (1 + total / 400)
    np.testing.assert_allclose(result.mean(0), mean, atol=5 * np.sqrt(variance.max() / 2000))
    np.testing.assert_allclose(result.var(0), variance, rtol=0.2)


def test_with_a_tiny_alpha_each_client_has_one_label():
    clients = DirichletClients(LABELS, 2000, alpha=1e-5, median_examples=10)
    result = frequencies(clients, 2000)
    assert (result.max(1) == 1).all()
    np.testing.assert_allclose(result.mean(0), np.bincount(LABELS // 3) / len(LABELS), atol=0.05)


def test_sizes_are_log_normal():
    clients = DirichletClients(LABELS, 2000, alpha=1.0, median_examples=100, sigma=0.7)
    sizes = np.log([len(clients[k]) for k in range(2000)])
    assert sizes.mean() == pytest.approx(np.log(100), abs=0.06)
    assert sizes.std() == pytest.approx(0.7, rel=0.06)
    equal = DirichletClients(LABELS, 10, alpha=1.0, median_examples=7)
    assert {len(equal[k]) for k in range(10)} == {7}


@given(st.integers(-(2**70), 2**70), st.floats(0, 3), st.integers(1, 400), st.integers(1, 60))
def test_sizes_are_those_of_the_clients(seed, sigma, num_clients, most):
    clients = DirichletClients(
        LABELS,
        num_clients,
        alpha=1.0,
        median_examples=9.5,
        sigma=sigma,
        max_examples=most,
        seed=seed,
    )
    assert clients.sizes().tolist() == [len(indices) for indices in clients]


def test_sizes_are_of_many_clients_at_a_time(monkeypatch):
    clients = DirichletClients(LABELS, 2**18 + 7, alpha=1.0, median_examples=30, sigma=1.0)
    made, getitem = [], DirichletClients.__getitem__
    monkeypatch.setattr(
        DirichletClients, "__getitem__", lambda *args: made.append(args) or getitem(*args)
    )
    rounds = cohort_rounds(
        {"x": LABELS}, clients, ClientSampler(2**18 + 7, 2), batch_size=10, preprocess=dict
    )
    assert rounds.max_steps == -(-clients.sizes().max() // 10)
    assert len(made) <= 1000  # of a sample


def test_examples_of_a_label_are_equally_likely():
    clients = DirichletClients(LABELS, 3000, alpha=1e6, median_examples=200)
    drawn = np.bincount(np.concatenate([clients[k] for k in range(3000)]), minlength=len(LABELS))
    np.testing.assert_allclose(drawn, 1000, atol=5 * np.sqrt(1000))


def test_indexing_and_slicing_as_a_sequence():
    clients = DirichletClients(LABELS, 3, alpha=1.0, median_examples=5)
    assert len(list(clients)) == 3
    np.testing.assert_array_equal(clients[-1], clients[2])
    with pytest.raises(IndexError):
        clients[3]
    for leaf, other in zip(clients[1:], (clients[1], clients[2]), strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": []}, "labels is empty, expected at least 1"),
        ({"num_clients": 0}, "num_clients is 0, expected at least 1"),
        ({"alpha": 0.0}, "alpha is 0.0, expected a positive number"),
        ({"alpha": np.nan}, "alpha is nan, expected a positive number"),
        ({"median_examples": -1}, "median_examples is -1, expected a positive number"),
        ({"sigma": -0.1}, "sigma is -0.1, expected a finite number of at least 0"),
        ({"sigma": np.nan}, "sigma is nan, expected a finite number of at least 0"),
        ({"labels": [0.2, 1.7]}, "labels has dtype float64 and shape [2], expected one integer"),
        ({"max_examples": 0}, "max_examples is 0, expected at least 1"),
    ],
)
def test_bad_arguments_raise(changes, message):
    arguments = {"labels": LABELS, "num_clients": 5, "alpha": 1.0, "median_examples": 5.0} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        DirichletClients(**arguments)
