"""LEAF's synthetic clients, against a NumPy restatement of its generator."""

import numpy as np
import pytest

from fedpax.populations.synthetic_clients import leaf_clients


def reference(rng, num_clients, probabilities, num_features, num_classes):
    """Generate clients as LEAF's data_generator.py and main.py, example by example."""
    p = len(probabilities)
    sizes = [
        int(min(n + 5, 1000)) for n in rng.lognormal(3, 2, num_clients)
    ]  # before rounding: int(n) + 5 is the same
    q = rng.normal(0, 1, (num_features + 1, num_classes, p))
    locations = rng.normal(0, 1, (p, 1))
    means = [rng.normal(location, 1, p) for location in locations]
    clients = []
    for size in sizes:
        mean = means[rng.choice(p, p=probabilities)]
        w = np.matmul(q, rng.normal(mean, 0.1, p))
        location = rng.normal(rng.normal(0, 1), 1, num_features)
        z = rng.normal(0, 1, (size, num_features))
        noise = rng.normal(0, 0.1, (size, num_classes))
        x = np.ones((size, num_features + 1))
        y = []
        for i in range(size):
            for j in range(num_features):
                x[i, j + 1] = location[j] + np.sqrt((j + 1) ** -1.2) * z[i, j]
            scores = np.exp(x[i] @ w + noise[i])
            y.append(np.argmax(scores / scores.sum()))
        clients.append((x[:, 1:], np.array(y)))
    return clients


@pytest.mark.parametrize("probabilities", [(1.0,), (0.3, 0.7)])
def test_clients_equal_those_of_a_restated_generator(probabilities):
    expected = reference(np.random.default_rng(3), 12, probabilities, 7, 4)
    examples, population = leaf_clients(
        12, cluster_probabilities=probabilities, num_features=7, num_classes=4, seed=3
    )
    assert sum(map(len, population)) == len(examples["label"]) == len(examples["image"])
    for part, (x, y) in zip(population, expected, strict=True):
        np.testing.assert_allclose(examples["image"][part], x, rtol=1e-6)
        np.testing.assert_array_equal(examples["label"][part], y)


def test_sizes_and_inputs_follow_their_laws():
    examples, population = leaf_clients(2000, num_features=20, seed=1)
    sizes = np.array([len(part) for part in population])
    assert sizes.min() >= 5 and sizes.max() == 1000
    # A size is below 5 + e^3 with probability 1/2, and 1,000 with P(z > (log 995 - 3) / 2).
    assert abs(np.mean(sizes < 5 + np.e**3) - 0.5) < 4 * np.sqrt(0.25 / 2000)
    assert abs(np.mean(sizes == 1000) - 0.0256) < 4 * np.sqrt(0.0256 / 2000)
    means = np.array([examples["image"][part].mean() for part in population])
    # B_k ~ N(0, 1), and the mean over 20 features of N(B_k, 1), and of examples.
    assert abs(means.var() - (1 + 1 / 20)) < 0.15
    large = [examples["image"][part] for part in population if len(part) == 1000]
    variances = np.mean([own.var(axis=0) for own in large], axis=0)
    np.testing.assert_allclose(variances, np.arange(1, 21) ** -1.2, rtol=0.05)


def test_clients_of_a_cluster_share_a_model_and_two_clusters_have_two():
    def agreement(probabilities: tuple[float, ...]) -> float:
        """Return how well one least-squares classifier of all clients predicts, over seeds."""
        scores = []
        for seed in range(6):
            examples, _ = leaf_clients(
                60, cluster_probabilities=probabilities, num_features=5, num_classes=2, seed=seed
            )
            x = np.c_[np.ones(len(examples["image"])), examples["image"]]
            y = 2.0 * examples["label"] - 1
            scores.append(np.mean(np.sign(x @ np.linalg.lstsq(x, y)[0]) == y))
        return float(np.mean(scores))

    assert agreement((1.0,)) > 0.9 > agreement((0.5, 0.5)) + 0.03


def test_a_client_population_depends_on_the_seed():
    first, again, other = (leaf_clients(5, seed=seed)[0]["image"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or (first != other).any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cluster_probabilities": (0.5, 0.6)}, "cluster_probabilities is"),
        ({"cluster_probabilities": (1.5, -0.5)}, "positive numbers with sum 1"),
        ({"cluster_probabilities": ()}, "one for each cluster"),
        ({"num_features": 0}, "num_features 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        leaf_clients(3, **settings)
