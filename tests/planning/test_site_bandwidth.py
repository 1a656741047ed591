"""Compute utilization over the bandwidth between sites."""

import json

import numpy as np
import pytest

from fedpax.experiments.benchmarks import bandwidth
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


def test_the_published_table_is_reached_within_one_step_of_its_grid(capsys, tmp_path):
    result = list(bandwidth.cells())
    assert len(result) == 30
    assert max(abs(cell.steps) for cell in result) <= 1
    assert sum(cell.steps == 0 for cell in result) >= 24
    plot = tmp_path / "bandwidth.png"
    assert bandwidth.main([f"--plot={plot}"]) == 0
    assert "largest distance is 1" in capsys.readouterr().out and plot.stat().st_size > 10_000


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


def test_bits_of_a_plan_replace_the_formula(capsys, tmp_path):
    def plan_of(steps: int) -> dict:
        return {
            "experiment": "two_sites",
            "topology": {"slices": 2},
            "computation": {"num_parameters": 1000, "local_steps": steps},
            "between_slices": {"overlap": {"bytes_out_of_slice_per_round": 4000}},
        }

    for steps in (20, 100, 200):  # a round of DiLoCo has one exchange, and one of each fragment
        for method in ("DiLoCo", "streaming", "+ overlap", "+ 4 bits"):
            assert bandwidth.bits_per_parameter(method, plan_of(steps)) == 32
        assert bandwidth.bits_per_parameter("data parallel", plan_of(steps)) == 32 / steps
    plan = plan_of(20)
    by_formula = list(bandwidth.cells(params=1))
    by_plan = list(bandwidth.cells(params=1, bits={"DiLoCo": 16, "+ 4 bits": 8}))
    changed = {a.method for a, b in zip(by_formula, by_plan, strict=True) if a != b}
    assert changed == {"+ 4 bits"}  # the formula has 16 bits of each parameter

    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert bandwidth.main(["--plans", f"DiLoCo={tmp_path / 'plan.json'}"]) == 0
    assert "DiLoCo: 32.00 bits of each parameter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("eager=plan.json", "unknown methods ['eager']; choose from data parallel, DiLoCo"),
        ("DiLoCo=missing.json", "No such file"),
        ("DiLoCo=plan.json", "no transfers between two slices. Make it with --slices=2"),
    ],
)
def test_plans_that_do_not_fit_are_refused(monkeypatch, capsys, tmp_path, argument, words):
    monkeypatch.chdir(tmp_path)
    plan = {
        "experiment": "one_site",
        "topology": {"slices": 1},
        "between_slices": {"overlap": None},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(SystemExit):
        bandwidth.main(["--plans", argument])
    assert words in capsys.readouterr().err
