import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.data.populations.synthetic_clients import DirichletClients

LABELS = np.random.default_rng(0).choice(5, p=[0.4, 0.3, 0.15, 0.1, 0.05], size=600) * 3


@given(st.floats(1e-4, 1e3), st.integers(0, 2**40), st.integers(0, 999))
def test_a_client_is_a_function_of_its_number(alpha, seed, client):
    made = lambda: DirichletClients(
        LABELS, 1000, alpha=alpha, median=20, sigma=1.0, most=50, seed=seed
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


def test_labels_of_alike_clients_are_those_of_the_pool():
    clients = DirichletClients(LABELS, 400, alpha=1e6, median=500)
    pool = np.bincount(LABELS // 3) / len(LABELS)
    np.testing.assert_allclose(frequencies(clients).mean(0), pool, atol=0.01)
    assert np.abs(frequencies(clients) - pool).max() < 0.12


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_labels_vary_as_a_dirichlet_draw_does(alpha):
    """With concentration a: variance m (1 - m) / (sum a + 1) beside that of the finite draw."""
    clients = DirichletClients(LABELS, 2000, alpha=alpha, median=400)
    found = frequencies(clients, 2000)
    mean = np.bincount(LABELS // 3) / len(LABELS)
    total = alpha * 5
    variance = mean * (1 - mean) / (total + 1) * (1 + total / 400)
    np.testing.assert_allclose(found.mean(0), mean, atol=5 * np.sqrt(variance.max() / 2000))
    np.testing.assert_allclose(found.var(0), variance, rtol=0.2)


def test_tiny_alpha_gives_clients_of_one_label_by_their_share():
    clients = DirichletClients(LABELS, 2000, alpha=1e-5, median=10)
    found = frequencies(clients, 2000)
    assert (found.max(1) == 1).all()
    np.testing.assert_allclose(found.mean(0), np.bincount(LABELS // 3) / len(LABELS), atol=0.05)


def test_sizes_are_log_normal():
    clients = DirichletClients(LABELS, 2000, alpha=1.0, median=100, sigma=0.7)
    sizes = np.log([len(clients[k]) for k in range(2000)])
    assert sizes.mean() == pytest.approx(np.log(100), abs=0.06)
    assert sizes.std() == pytest.approx(0.7, rel=0.06)
    equal = DirichletClients(LABELS, 10, alpha=1.0, median=7)
    assert {len(equal[k]) for k in range(10)} == {7}


def test_examples_of_a_label_are_drawn_alike():
    clients = DirichletClients(LABELS, 3000, alpha=1e6, median=200)
    drawn = np.bincount(np.concatenate([clients[k] for k in range(3000)]), minlength=len(LABELS))
    np.testing.assert_allclose(drawn, 1000, atol=5 * np.sqrt(1000))


def test_clients_end_where_the_population_does():
    clients = DirichletClients(LABELS, 3, alpha=1.0, median=5)
    assert len(list(clients)) == 3
    np.testing.assert_array_equal(clients[-1], clients[2])
    with pytest.raises(IndexError):
        clients[3]
    for one, other in zip(clients[1:], (clients[1], clients[2]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": []}, "There are 0 labels, expected at least 1"),
        ({"clients": 0}, "clients is 0, expected at least 1"),
        ({"alpha": 0.0}, "alpha is 0.0, expected a positive number"),
        ({"alpha": np.nan}, "alpha is nan, expected a positive number"),
        ({"median": -1}, "median is -1, expected a positive number"),
        ({"sigma": -0.1}, "sigma is -0.1, expected a finite number of at least 0"),
        ({"sigma": np.nan}, "sigma is nan, expected a finite number of at least 0"),
        ({"labels": [0.2, 1.7]}, "labels must be one integer for each example"),
        ({"most": 0}, "most is 0, expected at least 1"),
    ],
)
def test_bad_arguments_are_told(changes, message):
    arguments = {"labels": LABELS, "clients": 5, "alpha": 1.0, "median": 5.0} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        DirichletClients(**arguments)
