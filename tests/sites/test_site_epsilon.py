"""The epsilon of each site counts the sums that have its terms, and no seed gives their noise."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.aggregators import PrivacyAccountant
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.client_aggregators import aggregator
from fedpax.sites.coordinator_rounds import Coordinator
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_table import format_sites, read_sites
from sites.federation import run, write_hospitals
from sites.small_experiment import small, train_together
from sites.test_equals_training import SIZES, experiment
from sites.test_private_sums_of_sites import RANGES
from sites.test_rounds import Faulty

MANY = {"features": 4000}  # parameters, for the standard deviation of their noise
STDDEV = 2.0 / 3  # noise_multiplier * max_norm / clients


def three_sites(method: str, rounds: int) -> dict[str, Any]:
    return {name: small(method, rounds, data_seed=k, **MANY) for k, name in enumerate("abc")}


def simulate(method: str, rounds: int) -> np.ndarray:
    """Train all clients in one program, whose noise is drawn from the seed."""
    sites = three_sites(method, rounds)
    return flat(train_together(sites, rounds, lambda _: list(sites)).params)


def flat(params: Any) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


def test_nobody_computes_the_noise_from_the_seed(tmp_path: Path) -> None:
    sites = three_sites("private", 1)
    first, second = (
        flat(run(small("private", 1, **MANY), sites, tmp_path / where).params) for where in "12"
    )
    exact, seeded = simulate("clipped", 1), simulate("private", 1)
    np.testing.assert_allclose((seeded - exact).std(), STDDEV, rtol=0.05)  # a simulation
    for model in (first, second):
        np.testing.assert_allclose((model - exact).std(), STDDEV, rtol=0.05)
        # An attacker who subtracts the noise of the seed has more noise than before.
        attacked = model - (seeded - exact) - exact
        np.testing.assert_allclose(attacked.std(), 2**0.5 * STDDEV, rtol=0.05)
    np.testing.assert_allclose((first - second).std(), 2**0.5 * STDDEV, rtol=0.05)


def test_rounds_without_noise_equal_the_simulation(tmp_path: Path) -> None:
    outcome = run(small("clipped", 2, **MANY), three_sites("clipped", 2), tmp_path)
    np.testing.assert_allclose(flat(outcome.params), simulate("clipped", 2), rtol=0, atol=1e-6)


def test_a_coordinator_that_resumes_draws_new_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that was lost before it was saved is counted once: no site had its model."""
    save, lost = Coordinator._save, list[np.ndarray]()

    def fail(self: Coordinator, number: int) -> None:
        if number == 2 and not lost:
            lost.append(flat(self.params))
            raise OSError("killed")
        save(self, number)

    monkeypatch.setattr(Coordinator, "_save", fail)
    sites = three_sites("private", 2)
    with pytest.raises(OSError, match="killed"):
        run(small("private", 2, **MANY), sites, tmp_path)
    outcome = run(small("private", 2, **MANY), sites, tmp_path, done=1)
    difference = flat(outcome.params) - lost[0]
    np.testing.assert_allclose(difference.std(), 2**0.5 * STDDEV, rtol=0.05)
    metrics = select(read_metrics(tmp_path / "coordinator"), "training")
    spent = [PrivacyAccountant(2.0, 1e-6).epsilon(r) for r in (1, 2)]
    np.testing.assert_allclose([m["epsilon"] for m in metrics], spent, rtol=1e-5)


def test_a_site_that_a_round_lacks_spends_less(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    fields = {
        "aggregator": aggregator("private_mean", max_norm=1.0, noise_multiplier=4.0),
        "rounds": 2,
        "columns": RANGES,
    }
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", **fields) for s in SIZES}
    run(
        experiment(**fields),
        sites,
        tmp_path / "runs",
        rules=RoundRules(2, 60.0),
        first_round_needs=3,
        lines={"b": lambda exchange: Faulty(exchange, "nan", {2})},
    )
    folder = tmp_path / "runs" / "coordinator"
    rows = {site.name: site for site in read_sites(folder)}
    spent = PrivacyAccountant(4.0, 1e-6).epsilon
    assert rows["a"].epsilon == pytest.approx(spent(3), rel=1e-5)  # statistics, and two rounds
    assert rows["b"].epsilon == pytest.approx(spent(2), rel=1e-5)
    last = select(read_metrics(folder), "training")[-1]
    assert last["site/a/epsilon"] == pytest.approx(spent(3), rel=1e-5)
    assert last["site/b/epsilon"] == pytest.approx(spent(2), rel=1e-5)
    assert "epsilon" in format_sites(list(rows.values()))
