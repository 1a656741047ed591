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
    prepare,
)
from fedpax.user_files import file_sizes, held_out


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
        "iid:7:3": partition_iid(300, 7, seed=3),
        "dirichlet:0.3:12:1": partition_dirichlet(labels, 12, alpha=0.3, seed=1),
        "shards:2:10:2": partition_by_shards(labels, 10, shards_per_participant=2, seed=2),
        "quantity:0.5:9:5": partition_by_quantity(300, 9, alpha=0.5, seed=5),
    }
    for partition, parts in expected.items():
        source = load(folder / "*.parquet", label="kind", partition=partition)
        assert source.client_names == list(range(len(parts)))
        np.testing.assert_array_equal(source.column("row"), np.concatenate(parts))
    memory = load({"x": np.arange(20)}, partition="iid:4")
    np.testing.assert_array_equal(memory.column("x"), np.concatenate(partition_iid(20, 4)))


def test_clients_of_a_prepared_folder_are_those_of_the_function(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.random.default_rng(1).choice([0.5, np.nan, 2.0, -7.0], 120)
    table = pa.table({"who": ["b", "a", "c"] * 40, "y": labels, "row": np.arange(120)})
    parquet.write_table(table, folder / "all.parquet")
    prepare(folder / "all.parquet", tmp_path / "by_column", client="who")
    prepare([folder / f"{k}.parquet" for k in range(3)], tmp_path / "by_file")

    plain = load(tmp_path / "by_column")
    texts = [str(y) for y in plain.column("y")]
    source = load(tmp_path / "by_column", label="y", partition="dirichlet:0.3:6")
    parts = partition_dirichlet(np.unique(texts, return_inverse=True)[1], 6, alpha=0.3)
    rows = plain.column("row")[np.concatenate(parts)]
    np.testing.assert_array_equal(source.column("row"), rows)
    assert source.fields == ("who", "y", "row", "client")
    np.testing.assert_array_equal(np.diff(source.client_starts), [len(part) for part in parts])
    few = load(tmp_path / "by_column", columns=["row"], partition="dirichlet:0.3:6", label="y")
    assert few.fields == ("row", "client", "y")

    source = load(tmp_path / "by_file", partition="quantity:0.5:9")
    assert source.fields == ("kind", "row", "client") and len(source) == 300
    np.testing.assert_array_equal(source.client_names, np.arange(9))

    monkeypatch.setattr(file_sizes, "_available_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"sort .*by_column by the clients .* takes 0.0 GB .*"):
        load(tmp_path / "by_column", partition="iid:5")


def test_labels_are_numbered_by_their_texts() -> None:
    for values in ([3, None, 10, 3], ["ö", "missing", None, "a"], [True, None, False], [None], []):
        column = pa.chunked_array(
            [pa.array(values[:2]), pa.array(values[2:])], pa.array(values).type
        )
        texts = ["missing" if value is None else str(value) for value in values]
        expected = np.unique([*texts, "missing"], return_inverse=True)[1][:-1]
        np.testing.assert_array_equal(held_out._numbered(column), expected)


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
        ({"partition": "iid:3:4:5"}, r"partition='iid:3:4:5', expected one of"),
        ({"partition": "iid:3:-1"}, r"partition='iid:3:-1', expected one of"),
        ({"partition": "iid:3:x"}, r"partition='iid:3:x', expected one of"),
        ({"partition": "best"}, r"partition='best', expected one of"),
        ({"partition": "shards:2:10"}, r"label=None is not a column. Set label to one of 'kind'"),
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
