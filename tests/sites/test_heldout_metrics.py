"""The metrics of all held-out examples together: as if they were in one place."""

import csv
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.experiments.fedavg_table import FedAvgTable
from fedpax.experiments.fedavg_words import fedadam_stackoverflow
from fedpax.experiments.parts.client_evaluation import finish_perplexity, finish_regression
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.table_data import TableConfig
from fedpax.sites.site_evaluation import Heldout, _weighted_mean
from fedpax.training.training_config import TrainingConfig
from sites.federation import run

SITES = {"a": (60, 45), "b": (90,), "c": (25, 50, 30)}


def write_meters(folder: Path) -> None:
    """Write consumptions, whose level and spread differ between sites."""
    random, number = np.random.default_rng(0), 0
    for place, (site, counts) in enumerate(SITES.items()):
        (folder / site).mkdir(parents=True)
        for count in counts:
            number += 1
            with (folder / site / f"{site}_{number}.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["temperature", "consumption"])
                for _ in range(count):
                    temperature = random.normal(10 + place, 5)
                    noise = random.normal(0, 1 + 3 * place)
                    used = 40 + 25 * place - 0.7 * temperature + noise
                    table.writerow([f"{temperature:.2f}", f"{used:.3f}"])


def experiment(*files: str, heldout_clients: float = 0.0) -> FedAvgTable:
    return FedAvgTable(
        data=TableConfig(files=files, label="consumption", heldout_clients=heldout_clients),
        cohort=CohortConfig(size=10, batch_size=16),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=2, evaluate_every=2, checkpoint_every=0),
    )


@pytest.mark.parametrize("heldout_clients", [0.0, 0.6])
def test_rmse_and_r2_equal_those_of_all_files(tmp_path: Path, heldout_clients: float) -> None:
    write_meters(tmp_path / "data")

    def make(*files: str) -> FedAvgTable:
        return experiment(*files, heldout_clients=heldout_clients)

    sites = {s: make(f"{tmp_path}/data/{s}/*.csv") for s in SITES}
    outcome = run(make(), sites, tmp_path / "runs", personal=True)
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "evaluation")
    whole = make(f"{tmp_path}/data/*/*.csv").build()
    tree = jax.tree.structure(jax.eval_shape(whole.init, jax.random.key(0)))
    with jax.set_mesh(whole.mesh):
        wanted = whole.evaluate(jax.tree.unflatten(tree, outcome.params))
    assert ("new_clients/r2" in wanted) == (heldout_clients > 0)
    assert {"loss", "rmse", "r2"} <= wanted.keys() <= line.keys()
    for name, value in wanted.items():
        assert line[name] == pytest.approx(value, rel=1e-5), name
    # A site's own metrics are those that it prints, and no moment of its labels is shown.
    for site in SITES:
        (own,) = select(read_metrics(tmp_path / "runs" / site), "evaluation")
        assert {"r2", "fine_tuned_rmse", "fine_tuned_r2", "personal_loss"} <= own.keys()
        for name in own.keys() - {"kind", "round"}:
            assert line[f"site/{site}/{name}"] == pytest.approx(own[name]), name
    assert not [name for name in line if "label" in name]
    mean = np.mean([line[f"site/{site}/r2"] for site in SITES])
    assert abs(line["r2"] - mean) > 0.05


def together(finish: Any, *sites: tuple[int, dict[str, float]]) -> dict[str, float]:
    return finish(_weighted_mean([Heldout(n, {}, means) for n, means in sites]))


def test_perplexity_and_accuracy_are_of_all_tokens_together() -> None:
    metrics = together(
        finish_perplexity,
        (3, {"loss": 1.0, "perplexity": math.e, "fine_tuned_loss": 0.5}),
        (1, {"loss": 3.0, "perplexity": math.e**3, "fine_tuned_loss": 0.5}),
    )
    assert metrics == {"loss": 1.5, "perplexity": math.exp(1.5), "fine_tuned_loss": 0.5}
    words = fedadam_stackoverflow().finish_metrics
    counts: Any = [
        (10, {"loss": 1.0, "known": 0.5, "known_correct": 0.5}),
        (10, {"loss": 1.0, "known": 1.0, "known_correct": 0.1}),
    ]
    assert together(words, *counts)["accuracy"] == pytest.approx(6 / 15)


def test_parts_count_by_their_own_examples() -> None:
    sites = [
        Heldout(9, {"new_clients/": 1}, {"loss": 0.0, "new_clients/loss": 0.0}),
        Heldout(1, {"new_clients/": 3}, {"loss": 1.0, "new_clients/loss": 1.0}),
    ]
    assert _weighted_mean(sites) == {"loss": 0.1, "new_clients/loss": 0.75}


def test_labels_that_are_equal_have_no_r2() -> None:
    means = {"loss": 4.0, "label": 0.1, "label_squared": 0.1**2}
    metrics = finish_regression(3.0, means)
    assert metrics["rmse"] == 6.0 and math.isnan(metrics["r2"])
