"""Models of each client's own over sites equal the models of training on all files."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from fedpax.checkpoints.saved_state import load_state
from fedpax.experiments.fedavg_table import FedAvgTable
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.client_methods import method
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.sites.site_experiment import ClientRange
from fedpax.sites.site_files import SiteState
from fedpax.sites.site_table import format_sites, read_sites
from sites.federation import run, write_hospitals
from sites.test_equals_training import TWO_SITES, experiment, train_together


@pytest.mark.parametrize("name", ["ditto", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_equal_to_training_on_all_files(tmp_path: Path, name: str) -> None:
    write_hospitals(tmp_path / "data", TWO_SITES)
    # A step takes all examples of a client: their order depends on the client's number.
    cohort = CohortConfig(size=10, batch_size=64, local_epochs=3)

    def make(*files: str) -> FedAvgTable:
        return dataclasses.replace(experiment(*files, method=method(name)), cohort=cohort)

    sites = {s: make(f"{tmp_path}/data/{s}/*.csv") for s in TWO_SITES}
    outcome = run(make(), sites, tmp_path / "runs", personal=True)
    folder = tmp_path / "runs" / "coordinator"
    last = select(read_metrics(folder), "evaluation")[-1]

    whole = make(f"{tmp_path}/data/*/*.csv")
    whole = whole.sized(len(whole.training_parts))
    built = whole.build()
    state = jax.jit(built.algorithm.init)(built.init(jax.random.key(0)))
    step = jax.jit(built.algorithm.round)
    for _ in range(2):
        state, _ = step(state, next(built.cohorts))
    expected = whole.own_model_means(fine_tune=True)(state)
    assert abs(expected["loss"] - last["loss"]) > 1e-3  # of the shared model
    for metric, value in expected.items():
        np.testing.assert_allclose(last[f"personal_{metric}"], value, rtol=0, atol=1e-5)
    # A fine-tuned model of a site is a round of its clients alone from the shared model.
    saved = load_state(tmp_path / "runs/a/fine_tuned", 2, SiteState(outcome.coordinator.params))
    alone = dataclasses.replace(make(f"{tmp_path}/data/a/*.csv"), method=method("fedavg"))
    alone = alone.with_inputs(outcome.coordinator.exchange.inputs).sized(2).build()
    state = alone.algorithm.init(outcome.coordinator.params)
    state, _ = alone.algorithm.round(state, next(alone.cohorts))
    for leaf, other, shared in zip(
        *map(jax.tree.leaves, (saved.params, state.params)), outcome.params, strict=True
    ):
        assert np.abs(leaf - shared).max() > 1e-4
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-5)
    rows = read_sites(folder)
    assert all("fine_tuned_loss" in row.heldout for row in rows)
    assert {"personal_loss", "loss"} <= rows[0].heldout.keys()
    assert "held-out personal_loss" in format_sites(rows)


def test_clusters_equal_training_on_all_files(tmp_path: Path) -> None:
    """All clients of site b choose another model than those of site a."""
    write_hospitals(tmp_path / "data", TWO_SITES)
    for path in (tmp_path / "data" / "b").iterdir():
        text = path.read_text()
        swapped = text.replace(",ill\n", ",\n").replace(",well\n", ",ill\n")
        path.write_text(swapped.replace(",\n", ",well\n"))

    def make(*files: str) -> FedAvgTable:
        made = experiment(*files, method=method("hypcluster"), batch_size=64, rounds=3)
        return dataclasses.replace(made, hidden_sizes=(4,), client_learning_rate=1.0)

    sites = {s: make(f"{tmp_path}/data/{s}/*.csv") for s in TWO_SITES}
    outcome = run(make(), sites, tmp_path / "runs", personal=True)
    folder = tmp_path / "runs" / "coordinator"
    last = select(read_metrics(folder), "evaluation")[-1]
    whole = make(f"{tmp_path}/data/*/*.csv")
    expected = train_together(whole, 3)
    for leaf, other in zip(outcome.params, expected, strict=True):
        assert np.abs(other[0] - other[1]).max() > 0.1
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-5)
    evaluation = whole.build().evaluate
    assert evaluation is not None
    for metric, value in evaluation(outcome.coordinator.params).items():
        np.testing.assert_allclose(last[metric], value, rtol=0, atol=1e-5)
        np.testing.assert_allclose(last[f"personal_{metric}"], value, rtol=0, atol=1e-5)
    assert not (tmp_path / "runs/a/fine_tuned").exists()  # no single model to tune
    shares = [line["site/a/weight"] for line in select(read_metrics(folder), "training")]
    np.testing.assert_allclose(shares, whole_share(whole), rtol=1e-6)


def whole_share(whole: FedAvgTable) -> float:
    """Return the share of site a, of two clients, in the training examples."""
    counts = [len(part) for part in whole.training_parts.values()]
    return sum(counts[:2]) / sum(counts)


def test_a_site_without_held_out_examples_of_training_clients_has_no_metrics(
    tmp_path: Path,
) -> None:
    write_hospitals(tmp_path / "data", {"a": [40] * 8})
    made = experiment(f"{tmp_path}/data/a/*.csv", method=method("hypcluster"))
    data = dataclasses.replace(made.data, heldout_fraction=0.0, heldout_clients=0.4)
    site = dataclasses.replace(made, data=data)
    number = site.describe_site()["clients"]
    assert number < 8
    assert site.at_site(ClientRange(0, number, number)).evaluate is None
