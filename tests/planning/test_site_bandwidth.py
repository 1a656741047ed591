"""Compute utilization over the bandwidth between sites."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from fedpax.planning.overlap import (
    SiteExchange,
    SiteWorkload,
    compute_utilization,
    exposed_seconds,
    required_bandwidth,
)

MODEL = SiteWorkload(num_params=12e9, num_layers=12, step_seconds=0.9)


def simulate(
    model: SiteWorkload, exchange: SiteExchange, bits_per_second: float, dt: float
) -> float:
    """Step through one exchange of each fragment in time, and sum the time that waits."""
    waited = 0.0
    for fragment in range(exchange.fragments):
        queue = [n for n in reversed(range(model.num_layers)) if n % exchange.fragments == fragment]
        left = {n: exchange.bits * model.num_params / model.num_layers for n in queue}
        time = -2 / 3 * model.step_seconds
        while queue:
            layer = queue[0]
            if time >= -2 / 3 * model.step_seconds * layer / model.num_layers:
                left[layer] -= bits_per_second * dt
                if left[layer] <= 0:
                    queue.pop(0)
            time += dt
        waited += max(0.0, time - exchange.overlap_steps * model.step_seconds)
    return waited


@pytest.mark.parametrize("gigabits", [60, 250, 900])
@pytest.mark.parametrize(
    "exchange",
    [
        SiteExchange(),
        SiteExchange(period=10, fragments=4),
        SiteExchange(fragments=3, overlap_steps=1, bits=4),
    ],
)
def test_equals_a_simulation_in_small_steps_of_time(exchange: SiteExchange, gigabits: float):
    want = simulate(MODEL, exchange, gigabits * 1e9, dt=2e-4)
    got = exposed_seconds(MODEL, exchange, gigabits * 1e9)
    np.testing.assert_allclose(got, want, atol=2e-4 * 14 * exchange.fragments)


def test_without_overlap_a_slow_link_costs_the_bits_over_the_bandwidth():
    exchange = SiteExchange(period=50)
    seconds = exposed_seconds(MODEL, exchange, 1e9)
    # All but the backward pass up to the first gradient's end is exposed.
    assert 0 < 16 * 12 - seconds < 0.9
    used = 50 * 0.9
    np.testing.assert_allclose(compute_utilization(MODEL, exchange, 1e9), used / (used + seconds))


# Table 4 of arXiv:2501.18512: Gbit/s for 95% and 99%, by method and model.
MODELS = {
    "1B": SiteWorkload(num_params=1e9, num_layers=24, step_seconds=0.1),
    "10B": SiteWorkload(num_params=10e9, num_layers=48, step_seconds=0.8),
    "100B": SiteWorkload(num_params=100e9, num_layers=108, step_seconds=4.9),
}
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "data parallel": {"1B": (222, 569), "10B": (268, 472), "100B": (391, 472)},
    "DiLoCo": {"1B": (23.3, 86.8), "10B": (33.9, 104.8), "100B": (49.4, 184)},
    "streaming": {"1B": (16, 28.1), "10B": (13.3, 19.3), "100B": (11, 19.3)},
    "+ overlap": {"1B": (9.1, 11), "10B": (6.2, 7.5), "100B": (5.2, 5.2)},
    "+ 4 bits": {"1B": (2.0, 3.0), "10B": (1.4, 1.7), "100B": (1.1, 1.4)},
}


def test_the_published_table_is_reached_within_one_step_of_its_grid():
    grid, distances = np.logspace(-1, 3, 50) * 1e9, []
    for name, model in MODELS.items():
        fields: dict[str, Any] = {"period": 100, "fragments": model.num_layers // 3}
        exchanges = {
            "data parallel": SiteExchange(),
            "DiLoCo": SiteExchange(period=100),
            "streaming": SiteExchange(**fields),
            "+ overlap": SiteExchange(**fields, overlap_steps=1),
            "+ 4 bits": SiteExchange(**fields, overlap_steps=1, bits=4),
        }
        exchanged = dataclasses.replace(model, num_params=0.83 * model.num_params)
        for method, exchange in exchanges.items():
            for utilization, paper in zip((0.95, 0.99), PUBLISHED[method][name], strict=True):
                computed = required_bandwidth(exchanged, exchange, utilization, grid) / 1e9
                steps = np.log(computed / paper) / np.log(grid[1] / grid[0])
                distances.append(abs(round(float(steps))))
    assert len(distances) == 30 and max(distances) == 1
    assert distances.count(0) == 26


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="expected numbers above 0"):
        SiteWorkload(num_params=0, num_layers=1, step_seconds=1.0)
    with pytest.raises(ValueError, match="overlap_steps of at least 0"):
        SiteExchange(overlap_steps=-1)
    with pytest.raises(ValueError, match="bits_per_second is 0"):
        exposed_seconds(MODEL, SiteExchange(), 0)
    with pytest.raises(ValueError, match=r"utilization is 1.5"):
        required_bandwidth(MODEL, SiteExchange(), 1.5, [1e9])
    assert required_bandwidth(MODEL, SiteExchange(), 0.99, [1.0]) == np.inf
