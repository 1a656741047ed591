"""Random tables of hospitals, whose examples differ in number and in kind."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.experiments.fedavg_table import FedAvgTable, fedavg_table
from fedpax.settings.table_data import TableConfig
from fedpax.training.training_config import TrainingConfig

SIZES = {
    "Århus": 31, "Łódź": 18, "Zürich": 40, "東京": 9, "Oslo": 25, "Ávila": 3,
    "Bonn": 12, "Cork": 22, "Graz": 17, "Lund": 8, "Nice": 1, "Paris": 28,
}  # fmt: skip


def make_rows(rng: np.random.Generator, client: int, size: int) -> list[dict[str, Any]]:
    """Rows of a hospital. At the hospital of number 3 all have one outcome."""
    rows = []
    for _ in range(size):
        age, lab = rng.normal(55 + client, 12), rng.normal(1e4, 3.0)
        ill = 1 / (1 + np.exp(-0.1 * (age - 60) - 0.5 * (lab - 1e4))) > rng.random()
        rows.append(
            {
                "age": "" if rng.random() < 0.1 else f"{age:.2f}",
                "lab_värde": f"{lab:.3f}",
                "kön": rng.choice(["kvinna", "man", ""], p=[0.45, 0.45, 0.1]),
                "note": f"patient {rng.integers(10**9)}",
                "score": f"{0.2 * age + 0.1 * (lab - 1e4) + rng.normal():.4f}",
                "outcome": "sjuk" if ill and client != 3 else "frisk",
            }
        )
    return rows


def write_hospitals(path: Path) -> None:
    """Write a file for each hospital."""
    rng = np.random.default_rng(0)
    for client, (name, size) in enumerate(SIZES.items()):
        rows = make_rows(rng, client, size)
        with (path / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def make(folder: Path, label: str, **fields: Any) -> FedAvgTable:
    base = fedavg_table()
    data = {k: fields.pop(k) for k in list(fields) if hasattr(TableConfig(), k)}
    other = "score" if label == "outcome" else "outcome"
    data.setdefault("columns", (f"{other}=left_out",))
    training = TrainingConfig(rounds=3, evaluate_every=0, checkpoint_every=0)
    cohort = dataclasses.replace(base.cohort, batch_size=8, size=fields.pop("size", 100))
    return dataclasses.replace(
        base,
        data=TableConfig(files=(str(folder / "*.csv"),), label=label, **data),
        training=training,
        cohort=cohort,
        **fields,
    )


def read_by_hand(folder: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    """The rows of all files, by hospital in the order of names, in plain Python."""
    rows, owners = [], []
    names = sorted(SIZES)
    for name in names:
        with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            own = list(csv.DictReader(file))
        rows += own
        owners += [name] * len(own)
    columns = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    return names, columns | {"client": np.array(owners)}
