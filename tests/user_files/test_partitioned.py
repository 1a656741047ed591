"""A partition makes the clients of the partition's function."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedpax.data import (
    load,
    partition_by_quantity,
    partition_by_shards,
    partition_dirichlet,
    partition_iid,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    labels = np.random.default_rng(0).choice(["dog", "cat", "eel"], 300)
    for k in range(3):
        part = slice(100 * k, 100 * k + 100)
        table = pa.table({"kind": labels[part], "row": np.arange(300)[part]})
        parquet.write_table(table, tmp_path / f"{k}.parquet")
    return tmp_path


def test_clients_are_those_of_the_function(folder: Path) -> None:
    plain = load([folder / f"{k}.parquet" for k in range(3)])
    order = np.argsort(plain.column("row"))
    labels = np.unique(plain.column("kind")[order], return_inverse=True)[1]
    expected: dict[str, Any] = {
        "iid:7": partition_iid(300, 7),
        "dirichlet:0.3:12": partition_dirichlet(labels, 12, alpha=0.3),
        "dirichlet:2": partition_dirichlet(labels, 100, alpha=2),
        "shards:2:10": partition_by_shards(labels, 10, shards_per_participant=2),
        "quantity:0.5:9": partition_by_quantity(300, 9, alpha=0.5),
    }
    for partition, parts in expected.items():
        source = load(folder / "*.parquet", label="kind", partition=partition)
        assert source.client_names == list(range(len(parts)))
        np.testing.assert_array_equal(source.column("row"), np.concatenate(parts))
    memory = load({"x": np.arange(20)}, partition="iid:4")
    np.testing.assert_array_equal(memory.column("x"), np.concatenate(partition_iid(20, 4)))


def test_both_sides_of_a_held_out_split_have_the_same_clients(folder: Path) -> None:
    whole = load(folder / "*.parquet", label="kind", partition="dirichlet:1:5")
    owner = dict(zip(whole.column("row"), whole.column("client"), strict=True))
    for split in ("train", "heldout"):
        source = load(
            folder / "*.parquet",
            split,
            label="kind",
            partition="dirichlet:1:5",
            heldout_fraction=0.3,
        )
        assert all(owner[row["row"]] == row["client"] for row in source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "dirichlet"}, r"partition='dirichlet', expected one of iid:CLIENTS"),
        ({"partition": "dirichlet:x:3"}, r"partition='dirichlet:x:3', expected one of"),
        ({"partition": "iid:3:4"}, r"partition='iid:3:4', expected one of"),
        ({"partition": "best"}, r"partition='best', expected one of"),
        ({"partition": "shards:2:10"}, r"label=None is no column. Set label to one of 'kind'"),
        ({"partition": "iid:3", "client": "kind"}, r"the files have them in the column 'kind'"),
        ({"partition": "iid:1000"}, r"300 examples are too few for 1000 participants"),
    ],
)
def test_what_is_refused(folder: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder / "*.parquet", **options)


def test_equal_examples_of_several_clients_are_on_one_side() -> None:
    data = {"x": np.arange(200) % 20}
    train, heldout = (
        load(data, split, partition="iid:10", heldout_fraction=0.5) for split in ("train", "test")
    )
    assert not {*train.column("x").tolist()} & {*heldout.column("x").tolist()}
