"""The epsilon of each site counts the sums that have its terms, sums of statistics included."""

from pathlib import Path

import pytest

from fedpax.aggregators import PrivacyAccountant
from fedpax.experiments.client_aggregators import aggregator
from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.guards import RoundRules
from fedpax.sites.site_table import format_sites, read_sites
from sites.federation import run, write_hospitals
from sites.test_equals_training import SIZES, experiment
from sites.test_private_sums_of_sites import RANGES
from sites.test_rounds import Faulty


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
