"""A table that stays on the disk trains as one in memory, and takes little memory."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedpax.checkpoints import load_params
from fedpax.data import ClientSampler, cohort_rounds, open_client_files, prepare
from fedpax.data.tables import prepared_table
from fedpax.data.tables.prepared_table import EncodedTable
from fedpax.experiments.fedavg_table import FedAvgTable, fedavg_table
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.client_methods import method
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.table_data import TableConfig
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig


def make_table(rng: np.random.Generator, size: int, clients: int = 30) -> pa.Table:
    owner = np.sort(rng.integers(0, clients, size))
    x, z = rng.normal(50, 10, size), rng.normal(1e4, 3.0, size)
    sites = np.array(["東", "ø", "a", "b", None], object)
    return pa.table(
        {
            "user": [f"u{k}" for k in owner],
            "x": pa.array(x, mask=rng.random(size) < 0.1),
            "z": z.astype(np.float32),
            "site": pa.array(sites[(owner + rng.integers(0, 2, size)) % 5]),
            "flag": pa.array(rng.random(size) < 0.5, mask=rng.random(size) < 0.1),
            "day": rng.integers(0, 9999, size).astype("datetime64[D]"),
            "note": [f"note {n}" for n in range(size)],
            "y": pa.array(rng.choice(["ill", "well"], size), mask=rng.random(size) < 0.05),
            "score": x + z + rng.normal(size=size),
        }
    )


def make_experiment(files: str, label: str, **settings: Any) -> FedAvgTable:
    data = TableConfig(files=(files,), label=label, missing_label="skip", **settings)
    return dataclasses.replace(fedavg_table(), data=data)


@pytest.mark.each_value
@pytest.mark.parametrize("label", ["y", "score"])
@pytest.mark.parametrize("split", [False, True])
def test_blocks_of_a_table_give_the_same_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str, split: bool
) -> None:
    rng = np.random.default_rng(0)
    for part, size in (("train", 600), ("test", 150)):
        parquet.write_table(make_table(rng, size), tmp_path / f"{part}.parquet")
        prepare(tmp_path / f"{part}.parquet", tmp_path / "p" / part, client="user")
    files = str(tmp_path / "p" / ("{split}" if split else "train"))
    stated = ("z=number(9900..10100)",)
    made = make_experiment(files, label, columns=stated, category_clients=5)
    expected, opened = made.prepared, made.opened
    assert not isinstance(expected.examples, EncodedTable)
    monkeypatch.setattr(open_client_files, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr(prepared_table, "IN_MEMORY", 0)
    again = make_experiment(files, label, columns=stated, category_clients=5)
    result = again.prepared
    assert isinstance(result.examples, EncodedTable)
    blocks = [columns for columns, _ in again.opened.blocks(opened.training)]
    assert len(blocks) > 10
    assert max(sum(column.nbytes for column in block.values()) for block in blocks) < 4000
    assert result.features == expected.features
    assert (result.label, result.notes) == (expected.label, expected.notes)
    np.testing.assert_array_equal(result.labels, expected.labels)
    rows = rng.permutation(len(expected.labels))
    for name, values in expected.read(rows).items():
        np.testing.assert_array_equal(result.read(rows)[name], values)
    for name, values in expected.read(opened.heldout).items():
        np.testing.assert_array_equal(result.read(again.opened.heldout)[name], values)
    np.testing.assert_array_equal(again.opened.owners, opened.owners)
    assert again.training_parts.keys() == made.training_parts.keys()
    for name, part in made.training_parts.items():
        np.testing.assert_array_equal(again.training_parts[name], part)
    examples, population = again.read_clients()
    monkeypatch.setattr(EncodedTable, "__getitem__", None)  # one example at a time is slow
    rounds = cohort_rounds(
        examples, population, ClientSampler(len(population), 5), batch_size=4, preprocess=dict
    )
    in_memory, population = made.read_clients()
    for name, values in next(rounds).batches.items():
        expected_rounds = cohort_rounds(
            in_memory, population, ClientSampler(len(population), 5), batch_size=4, preprocess=dict
        )
        np.testing.assert_array_equal(values, next(expected_rounds).batches[name])


def test_a_client_that_exceeds_a_block_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    table = {"user": ["a"] * 300 + ["b"] * 5, "x": rng.normal(size=305)}
    table["kind"] = [*rng.choice(["p", "q"], 300).tolist(), "p", "p", "r", "r", "r"]
    table["y"] = rng.integers(0, 2, 305)
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    prepare(tmp_path / "a.parquet", tmp_path / "p", client="user")
    names = []
    for block in (1 << 26, 900):
        monkeypatch.setattr(open_client_files, "_BLOCK_BYTES", block)
        made = make_experiment(str(tmp_path / "p"), "y", category_clients=2, heldout_fraction=0.1)
        names.append(made.prepared.features.names)
    assert names[0] == names[1] == ("x", "kind=p", "kind is another")


def test_clients_a_thousand_times_larger_train_as_in_rounds_of_equal_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    owner = np.repeat([f"é{k}" for k in range(41)], [2000, *rng.integers(2, 9, 40)])
    x = rng.normal(size=(len(owner), 2))
    y = (x.sum(axis=1) + rng.normal(size=len(owner)) > 0).astype(np.int32)
    columns = {"user": owner, "x0": x[:, 0], "x1": x[:, 1], "y": y}
    parquet.write_table(pa.table(columns), tmp_path / "all.parquet")
    made = make_experiment(str(tmp_path / "all.parquet"), "y", client="user")
    made = dataclasses.replace(
        made,
        cohort=CohortConfig(size=6, batch_size=2),
        training=TrainingConfig(rounds=12, evaluate_every=12, checkpoint_every=12),
    )
    lengths = {next(cohorts).batches["mask"].shape[1] for cohorts in [made.build().cohorts] * 12}
    assert len(lengths) > 1 and max(lengths) > 500 > 20 > min(lengths)
    train(made, tmp_path / "short")
    monkeypatch.setattr(FedAvgTable, "pad_to", "population")
    train(made, tmp_path / "whole")
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(tmp_path / "short"),
        load_params(tmp_path / "whole"),
    )
    assert len(select(read_metrics(tmp_path / "short"), "training")) == 12

    limited = dataclasses.replace(made, cohort=CohortConfig(size=6, batch_size=2, max_steps=100))
    count = [len(part) for part in made.training_parts.values()]
    note = f"1 of 40 clients leave out {count[0] - 200:,} of {sum(count):,} examples in a round"
    assert f"cohort.max_steps=100: {note}" in limited.build().notes
    assert not [note for note in made.build().notes if "max_steps" in note]

    # 2 fields, a mask and 800 steps of 2 examples: 6 clients fit, and the own models of 40 in parts
    sizes = {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 20 * 800 * 2 * 12}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    made.build()
    personal = dataclasses.replace(made, method=method("ditto"))
    run = personal.build()
    assert run.evaluate_own_models is not None
    metrics = run.evaluate_own_models(run.algorithm.init(run.init(jax.random.key(0))))
    heldout = personal.opened.parts(personal.opened.heldout)
    of_trained = [len(heldout.get(name, ())) for name in personal.training_parts]
    assert len(of_trained) == 40 and metrics.num_examples.sum() == sum(of_trained) > 0
