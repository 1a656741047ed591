"""Krum over sites with tables: the coordinator waits for its clients, and a site may have one."""

import time
from pathlib import Path

import numpy as np
import pytest

from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.client_aggregators import aggregator
from fedpax.sites.round_rules import RoundRules
from fedpax.transport.message import Message
from sites.federation import Line, run, write_hospitals
from sites.small_experiment import small
from sites.test_equals_training import SIZES, experiment, train_together

KRUM = {"aggregator": aggregator("krum", num_byzantine=1), "rounds": 1}
TOLD = (
    "waiting for more sites: those that are here have 3 clients, and --aggregator needs 5. Or "
    "change it, or its settings, in all commands"
)


def test_the_coordinator_waits_for_the_clients_of_krum(tmp_path: Path, notes: list[str]) -> None:
    """Sites a and b have three clients, which are enough for --min_sites and too few for Krum."""

    class Last(Line):
        def call(self, message: Message, timeout: float) -> Message:
            while TOLD not in notes:
                time.sleep(0.01)
            return super().call(message, timeout)

    write_hospitals(tmp_path / "data", SIZES)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", **KRUM) for s in SIZES}
    rules, folder = RoundRules(2, 60.0), tmp_path / "runs"
    outcome = run(experiment(**KRUM), sites, folder, rules=rules, lines={"c": Last})
    whole = experiment(f"{tmp_path}/data/*/*.csv", **KRUM)
    for leaf, other in zip(outcome.params, train_together(whole, 1), strict=True):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
    # `fedpax evaluate` of a site with one client.
    site = experiment(f"{tmp_path}/data/b/*.csv", **KRUM)
    site.read_inputs(folder / "b")
    (line,) = select(read_metrics(folder / "b"), "evaluation")
    evaluate = site.build().evaluate
    assert evaluate is not None
    assert evaluate(outcome.coordinator.params)["loss"] == pytest.approx(line["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bulyan", {"num_byzantine": 1}),
        pytest.param("trimmed_mean", {"trim_fraction": 0.2}, marks=pytest.mark.slow),
        pytest.param("krum", {"num_byzantine": 1, "num_selected": 2}, marks=pytest.mark.slow),
    ],
)
def test_robust_means_of_tables_equal_training(
    tmp_path: Path, name: str, settings: dict[str, float]
) -> None:
    """The statistics of columns are robust means too, which coordinators compute in two stages."""
    sizes = {"a": (40, 25, 20), "b": (33, 21), "c": (21, 50)}
    write_hospitals(tmp_path / "data", sizes)
    fields = {"aggregator": aggregator(name, **settings), "rounds": 1}
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", **fields) for s in sizes}
    outcome = run(experiment(**fields), sites, tmp_path / "runs")
    whole = experiment(f"{tmp_path}/data/*/*.csv", **fields)
    for leaf, other in zip(outcome.params, train_together(whole, 1), strict=True):
        assert np.abs(other).max() > 1e-3  # it begins from 0
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def test_training_names_the_number_of_its_clients(tmp_path: Path) -> None:
    write_hospitals(tmp_path, {"a": (40, 25, 30)})
    words = r"num_byzantine=1 with 3 clients in all: expected at most 0\. .*or add clients, or"
    with pytest.raises(ValueError, match=words):
        experiment(f"{tmp_path}/a/*.csv", **KRUM).build()


@pytest.mark.parametrize(
    ("name", "settings", "least"),
    [
        ("mean", {}, 1),
        ("krum", {"num_byzantine": 2, "num_selected": 5}, 9),
        ("bulyan", {"num_byzantine": 1}, 7),
        ("trimmed_mean", {"trim_fraction": 0.25}, 4),
        ("private_secure_mean", {"min_participants": 6}, 6),
    ],
)
def test_the_fewest_clients_of_an_aggregator(
    name: str, settings: dict[str, float], least: int
) -> None:
    assert aggregator(name, **settings).least_clients(100) == least


@pytest.mark.parametrize(("size", "secure_sums"), [(2, False), (6, False), (5, True)])
def test_a_sample_of_clients_is_told(
    tmp_path: Path, notes: list[str], size: int, secure_sums: bool
) -> None:
    fields = {"rounds": 1, "clients": 2, "cohort_size": size}
    sites = {name: small(**fields, data_seed=seed) for seed, name in enumerate("abc")}
    rules = RoundRules(3, 60.0, secure_sums=True) if secure_sums else None
    run(small(**fields), sites, tmp_path, rules=rules)
    told = [note for note in notes if "is the update of this client" in note]
    assert len(told) == (size == 2 and not secure_sums)
    assert all("rounds sample 2 of 6 clients" in note for note in told)
