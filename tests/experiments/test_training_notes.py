"""Notes at the start of a run on users' files, on unequal clients and rare classes."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fedpax.experiments.fedavg_table import FedAvgTable, fedavg_table
from fedpax.settings.client_aggregators import aggregator
from fedpax.settings.client_methods import method
from fedpax.settings.table_data import TableConfig


def write(folder: Path, sizes: list[int], rare: int = 0) -> FedAvgTable:
    """Write a file for each client; the first `rare` examples of the first have a third class."""
    rng = np.random.default_rng(0)
    for client, size in enumerate(sizes):
        labels = np.where(rng.random(size) < 0.5, "low", "high").astype(object)
        labels[: rare if client == 0 else 0] = "rare"
        rows = [
            f"{x:.3f},{label}\n" for x, label in zip(rng.normal(size=size), labels, strict=True)
        ]
        (folder / f"{client}.csv").write_text("x,y\n" + "".join(rows), "utf-8")
    data = TableConfig(
        files=(f"{folder}/*.csv",), label="y", columns=("x=number(-9..9)",), heldout_fraction=0.2
    )
    return dataclasses.replace(fedavg_table(), data=data)


def told(experiment: FedAvgTable, word: str) -> list[str]:
    return [note for note in experiment.build().notes if word in note]


def test_a_mean_that_counts_unequal_clients_alike_says_so(tmp_path: Path) -> None:
    base = write(tmp_path, [40, 4000, 300])
    parts = sorted(map(len, base.training_parts.values()))
    told_of = {
        name: told(dataclasses.replace(base, aggregator=aggregator(name)), "counts alike")
        for name in ("mean", "coordinate_median", "secure_mean")
    }
    assert not told_of["mean"]
    for name in ("coordinate_median", "secure_mean"):
        assert told_of[name] == [
            f"aggregator={name}: each client counts alike, with {parts[0]} to {parts[-1]:,} "
            "training examples. --aggregator=mean weighs by examples"
        ]


def test_scaffold_with_unequal_steps_says_what_limits_them(tmp_path: Path) -> None:
    base = dataclasses.replace(write(tmp_path, [15, 4000]), method=method("scaffold"))
    fewest, most = sorted(-(-len(part) // 16) for part in base.training_parts.values())
    (line,) = told(base, "control variates")
    assert line.startswith(f"method=scaffold: clients take {fewest} to {most} local steps in a")
    assert "--cohort.max_steps=10 limits" in line
    limited = dataclasses.replace(base.cohort, max_steps=9)
    assert not told(dataclasses.replace(base, cohort=limited), "control variates")
    assert not told(dataclasses.replace(base, method=method("fedavg")), "control variates")


@pytest.mark.parametrize("rare", [0, 1])
def test_a_class_that_a_part_has_no_example_of_is_told(tmp_path: Path, rare: int) -> None:
    base = write(tmp_path, [200, 100], rare)
    table = base.opened
    of_rare = base.prepared.labels == 2
    part = "held-out" if (of_rare & table.training).any() else "training"
    expected = [f"no {part} example of 'y' 'rare'"] if rare else []
    assert told(base, "example of 'y'") == expected
