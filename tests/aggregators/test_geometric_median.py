"""The geometric median: against float64, with wrong updates of any size."""

import functools

import jax
import numpy as np
import pytest
from numpy_robust_means import draw, flat, geometric_of

import fedpax
from fedpax.aggregators import geometric_median

N = 8


def test_the_geometric_median_is_that_of_weighted_distances():
    updates, weights = draw(6), np.float32([1, 2, 3, 1, 1, 1, 1, 4])
    aggregator = geometric_median(num_iterations=50)
    combine = fedpax.program(clients=N)(lambda *args: aggregator.aggregate(None, *args)[0])
    result = flat({key: x[None] for key, x in jax.jit(combine)(updates, weights).items()})[0]
    np.testing.assert_allclose(result, geometric_of(flat(updates), weights), atol=1e-5)


@functools.cache
def geometric(participants):
    return jax.jit(
        fedpax.program(clients=participants)(
            lambda updates: geometric_median().aggregate(None, updates, None)[0]
        )
    )


@pytest.mark.each_value
@pytest.mark.parametrize("center", [0.0, 3.0], ids=["centered", "far"])
@pytest.mark.parametrize(("participants", "num_wrong"), [(8, 1), (8, 3), (9, 4)])
def test_eight_iterations_reach_the_geometric_median_for_wrong_updates_of_any_size(
    participants, num_wrong, center
):
    """Within a tenth of the honest radius, and 1.5 of it from the honest mean.

    It is 0.3 of the radius where wrong updates are about as long as the honest ones. `far` honest
    updates have a mean of three times their radius. The reference is in float64. It leaves out the
    wrong updates whose norm is not finite in float32.
    """
    rng = np.random.default_rng(participants + num_wrong)
    x = np.float32(rng.standard_normal((participants, 30)))
    x[num_wrong:] -= x[num_wrong:].mean(0)
    radius = np.linalg.norm(x[num_wrong:], axis=1).max()
    x[num_wrong:] += center * radius / np.sqrt(30)
    honest = np.float64(x[num_wrong:])
    mean = honest.mean(0)
    each = rng.uniform(-1, 1, (num_wrong, 30))
    directions = {"equal": np.ones(30), "opposite": -np.ones(30), "each": each}
    for size in (0.0, 0.1, 1.0, 3.0, 10.0, 1e3, 1e6, 1e12, 3e38, np.inf, np.nan):
        for kind, direction in directions.items():
            x[:num_wrong] = size * np.float32(direction)
            kept = np.float64(x) if size < 1e18 else honest
            result = np.float64(geometric(participants)(x))
            distance = np.linalg.norm(result - geometric_of(kept, np.ones(len(kept))))
            assert distance < (0.3 if 0 < size < 1e3 else 0.1) * radius, (size, kind)
            assert np.linalg.norm(result - mean) < 1.5 * radius, (size, kind)
