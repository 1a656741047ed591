"""FedProx's synthetic clients."""

import numpy as np
import pytest

from fedpax.populations.synthetic_clients import logistic_clients


def test_logistic_clients_differ_by_alpha_and_beta():
    def spread(alpha: float, beta: float) -> tuple[float, float]:
        """Return the variance between clients of their inputs' mean, and of their labels."""
        examples, population = logistic_clients(200, alpha=alpha, beta=beta, seed=1)
        means = [examples["image"][part].mean() for part in population]
        largest = [np.bincount(examples["label"][part]).max() / len(part) for part in population]
        return np.var(means), np.mean(largest)

    # The mean over 60 inputs of v_k ~ N(B_k, 1), B_k ~ N(0, beta), has variance beta + 1 / 60.
    assert abs(spread(1.0, 0.0)[0] - 1 / 60) < 0.01
    assert abs(spread(1.0, 4.0)[0] - 4) < 4 * 4 * np.sqrt(2 / 200)
    again, population = logistic_clients(3, alpha=1.0, beta=1.0, seed=1)
    assert sorted(np.concatenate(population)) == list(range(len(again["label"])))
    assert all(50 <= len(part) <= 5000 for part in population)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"alpha": -1.0, "beta": 0.0}, "alpha is -1.0"), ({"num_classes": 0}, "num_classes 0")],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        logistic_clients(3, **({"alpha": 1.0, "beta": 1.0} | settings))
