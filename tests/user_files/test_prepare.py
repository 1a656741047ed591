"""Prepared folders equal the files in memory, appear whole or not at all, and open at once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet
from user_files.written_tables import all_types, assert_equal, write_arrow, write_csv, write_lines

from fedpax.data import ClientSampler, cohort_rounds, load, prepare
from fedpax.files import lock_file
from fedpax.populations.client_arrays import ContiguousClients
from fedpax.user_files import prepared
from fedpax.user_files.arrow_numpy import array_to_arrow
from fedpax.user_files.finding import find_files
from fedpax.user_files.formats import ReadOptions
from fedpax.user_files.readers import csv_files, json_files
from fedpax.user_files.readers.arrow_files import stream_parquet


@pytest.mark.parametrize("batch_rows", [1 << 17, 30, 1])
def test_values_of_every_type_are_those_of_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    monkeypatch.setattr(prepared, "_BATCH_ROWS", batch_rows)
    path = write_arrow(all_types(np.random.default_rng(0), 211), tmp_path / "a.arrow")
    made = prepare(path, tmp_path / "out", client="user", label="kind")
    expected = load(path, client="user")
    assert_equal(made.source, expected)
    opened = load(tmp_path / "out")
    assert_equal(opened, expected)
    assert opened.label == "kind" and made.skipped == {}
    options: Any = {"columns": ["text"], "client": "user", "label": "kind"}
    assert_equal(load(tmp_path / "out", **options), load(path, **options))
    assert [p.name for p in tmp_path.iterdir() if "draft" in p.name] == []


@pytest.mark.parametrize(
    ("suffix", "write"),
    [(".csv", write_csv), (".jsonl", write_lines), (".parquet", parquet.write_table)],
)
def test_many_files_with_clients_by_file_and_by_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, write: Any
) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 300)
    monkeypatch.setattr(json_files, "_STREAM_BLOCK", 300)
    rng = np.random.default_rng(1)
    for name in ("b", "ä", "a"):
        table = pa.table({"site": rng.choice(["n", "s"], 50), "x": rng.normal(size=50)})
        write(table, tmp_path / f"{name}{suffix}")
    for number, client in enumerate([None, "site"]):
        made = prepare(tmp_path / f"*{suffix}", tmp_path / f"out{number}", client=client)
        assert_equal(made.source, load(tmp_path / f"*{suffix}", client=client))
    plain = prepare(tmp_path / f"a{suffix}", tmp_path / "plain").source
    assert plain.client_starts is None
    assert_equal(plain, load(tmp_path / f"a{suffix}"))


@pytest.mark.parametrize(
    "values",
    [
        ["007"] * 200 + ["x"],  # text, whose zeros an integer would lose
        ["1"] * 200 + ["2.5"],
        [""] * 200 + ["3"],
        ["2020-01-01"] * 100 + ["soon"] * 100,
        ["true"] * 200 + ["7"],
    ],
)
def test_a_type_that_changes_late_is_that_of_the_whole_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str]
) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 256)
    monkeypatch.setattr(json_files, "_STREAM_BLOCK", 256)
    rows = "".join(f"u{n % 3},{value},{n}\n" for n, value in enumerate(values))
    (tmp_path / "a.csv").write_text("user,x,n\n" + rows)
    made = prepare(tmp_path / "a.csv", tmp_path / "out", client="user").source
    monkeypatch.setattr(csv_files, "_BLOCK", 1 << 24)
    assert_equal(made, load(tmp_path / "a.csv", client="user"))
    lines = [{"user": f"u{n % 3}", "x": value} for n, value in enumerate(values)]
    lines[-1]["new"] = 1  # type: ignore[assignment]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = prepare(tmp_path / "a.jsonl", tmp_path / "out2", client="user").source
    assert_equal(made, load(tmp_path / "a.jsonl", client="user"))


def test_a_client_is_a_slice_of_the_memory_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_BATCH_ROWS", 500)
    rng = np.random.default_rng(2)
    owner, x = rng.integers(0, 300, 20_000), rng.normal(size=20_000)
    path = write_arrow(pa.table({"user": owner, "x": x}), tmp_path / "a.arrow", 1000)
    prepare(path, tmp_path / "out", client="user")
    before = pa.total_allocated_bytes()
    source = load(tmp_path / "out")
    for k in (0, 17, 299):
        (chunk,) = source.client_table(k)["x"].chunks
        np.testing.assert_array_equal(
            chunk.to_numpy(zero_copy_only=True), x[owner == source.client_names[k]]
        )
    assert pa.total_allocated_bytes() - before < 10_000
    with pytest.raises(IndexError):
        source.client_table(300)


def test_rounds_of_a_prepared_population_are_those_of_the_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    table = pa.table({"user": rng.integers(0, 20, 400), "x": rng.normal(size=400)})
    path = write_arrow(table, tmp_path / "a.arrow")
    sources = prepare(path, tmp_path / "out", client="user").source, load(path, client="user")
    prepared_rounds, file_rounds = (
        cohort_rounds(
            source,
            ContiguousClients(source.client_starts),
            ClientSampler(20, 5),
            batch_size=4,
            preprocess=dict,
        )
        for source in sources
    )
    for _ in range(3):
        np.testing.assert_array_equal(
            next(prepared_rounds).batches["x"], next(file_rounds).batches["x"]
        )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 9))
def test_any_division_into_batches_has_the_same_clients(
    tmp_path_factory: Any, owners: list[int], written: int, batch_rows: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    table = pa.table({"user": owners, "n": range(len(owners))})
    path = write_arrow(table, folder / "a.arrow", written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "_BATCH_ROWS", batch_rows)
        assert_equal(prepare(path, folder / "out", client="user").source, load(path, client="user"))


def test_bad_rows_are_told_with_file_and_line_or_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,x\nann,1\nbo,2,3\n,4\nbo,5\n")
    (tmp_path / "b.csv").write_text("user,x\nann,6\n")
    with pytest.raises(
        ValueError, match=r"a.csv cannot .*row 3 has 3 columns, expected 2.*bad_row=skip"
    ):
        prepare(tmp_path / "*.csv", tmp_path / "out", client="user")
    made = prepare(tmp_path / "*.csv", tmp_path / "out", client="user", on_bad_row="skip")
    assert made.skipped == {str(tmp_path / "a.csv"): 2}
    assert made.first_skipped[str(tmp_path / "a.csv")].startswith("bo,2,3")
    assert made.source.column("x").tolist() == [1, 6, 5]
    (tmp_path / "c.jsonl").write_text(
        '{"u": "a", "x": 1}\n{"u": "a", "x"\n[1]\n{"u": "b", "x": 2}\n'
    )
    with pytest.raises(ValueError, match=r"c.jsonl cannot be read as jsonl: its line 2 is "):
        prepare(tmp_path / "c.jsonl", tmp_path / "out2", client="u")
    made = prepare(tmp_path / "c.jsonl", tmp_path / "out2", client="u", on_bad_row="skip")
    assert made.skipped == {str(tmp_path / "c.jsonl"): 2}
    assert made.source.column("x").tolist() == [1, 2]
    (tmp_path / "e.jsonl").write_text('{"u": "a"}\n[1]\n')  # all lines are JSON
    made = prepare(tmp_path / "e.jsonl", tmp_path / "out4", client="u", on_bad_row="skip")
    assert made.skipped == {str(tmp_path / "e.jsonl"): 1} and len(made.source) == 1
    (tmp_path / "d.csv").write_text("user,x\nann,1\n,2\n")
    with pytest.raises(ValueError, match=r"d.csv has no client in the column 'user' of example 1"):
        prepare(tmp_path / "d.csv", tmp_path / "out3", client="user")


def test_nothing_appears_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_arrow(pa.table({"user": [2, 1], "x": [1, 2]}), tmp_path / "a.arrow")

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedpax.user_files.preparing.write_prepared", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(path, tmp_path / "out", client="user")
    assert [p.name for p in tmp_path.iterdir()] == ["a.arrow"]
    prepare(path, tmp_path / "out", client="user")
    with pytest.raises(ValueError, match=r"out='.*out' exists, expected a new folder"):
        prepare(path, tmp_path / "out", client="user")


@pytest.mark.slow
def test_remains_of_a_killed_process_are_removed_and_drafts_in_use_stay(tmp_path: Path) -> None:
    path = write_arrow(pa.table({"user": [2, 1]}), tmp_path / "a.arrow")
    for name in (".[o]ut.draft-killed", ".[o]ut.draft-used", ".other.draft-killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_bytes(b"")
    with (tmp_path / ".[o]ut.draft-used" / "lock").open("rb") as file:
        assert lock_file(file)
        prepare(path, tmp_path / "[o]ut", client="user")
    names = {item.name for item in tmp_path.iterdir()}
    assert names == {"a.arrow", "[o]ut", ".[o]ut.draft-used", ".other.draft-killed"}


def test_memory_that_is_exceeded_goes_to_the_disk(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    for k in range(4):  # 150 MB in all
        x = array_to_arrow(rng.integers(-(2**63), 2**63, (48_000, 98)))  # of 8 bytes: few values
        parquet.write_table(
            pa.table({"user": rng.integers(0, 900, 48_000), "x": x}), tmp_path / f"{k}.parquet"
        )
    made = prepare(tmp_path / "*.parquet", tmp_path / "out", client="user", memory="130MB").source
    expected = load(tmp_path / "*.parquet", client="user")
    assert_equal(made, expected)
    with pytest.raises(ValueError, match="memory='1MB' is too little to sort"):
        prepare(tmp_path / "*.parquet", tmp_path / "more", client="user", memory="1MB")


def test_parquet_in_parts_takes_the_memory_of_a_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = np.random.default_rng(0).normal(size=2_000_000)
    parquet.write_table(pa.table({"x": values}), path, row_group_size=50_000, use_dictionary=False)
    before, held = pa.total_allocated_bytes(), []
    (file,) = find_files([str(path)], None)
    for _ in stream_parquet(file, ReadOptions((), {}, None)):
        held.append(pa.total_allocated_bytes() - before)
    assert max(held) < values.nbytes / 4


def test_a_client_larger_than_batches_is_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_BATCH_BYTES", 1000)
    table = pa.table({"user": [1] * 3 + [0] * 4000 + [1] * 5, "x": range(4008)})
    path = write_arrow(table, tmp_path / "a.arrow", 100)
    with monkeypatch.context() as patch:
        patch.setattr("fedpax.user_files.preparing.sort_tables", split_sorted)
        source = prepare(path, tmp_path / "out", client="user").source
    assert_equal(source, load(path, client="user"))
    assert source.client_table(0)["x"].num_chunks > 5


def split_sorted(tables: Any, schema: pa.Schema, keys: list[str], *rest: Any) -> Any:
    together = pa.concat_tables(tables).sort_by([(key, "ascending") for key in keys])
    for k in range(0, len(together), 100):
        yield together.slice(k, 100)


def test_too_little_space_is_told_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_arrow(pa.table({"user": [2, 1]}), tmp_path / "a.arrow")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 0))  # type: ignore[attr-defined]
        with pytest.raises(OSError, match=r"has 0.0 GB free.*out= on another disk"):
            prepare(path, tmp_path / "out", client="user")

    def full(*arguments: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("fedpax.user_files.preparing.write_prepared", full)
    with pytest.raises(OSError, match=r"GB free.*Nothing was written"):
        prepare(path, tmp_path / "out", client="user")
    assert not (tmp_path / "out").exists()


def test_splits_have_folders_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    table = pa.table({"user": rng.integers(0, 9, 300), "x": rng.normal(size=300)})
    path = write_arrow(table, tmp_path / "a.arrow")
    options: Any = {"client": "user", "heldout_fraction": 0.2}
    for split in ("train", "heldout"):
        made = prepare(path, tmp_path / "out" / split, split=split, **options).source
        assert_equal(made, load(path, split, **options))
        assert_equal(load(tmp_path / "out", split), made)
    with pytest.raises(ValueError, match=r"would copy the folder.*--split=train"):
        load(tmp_path / "out", "train", heldout_fraction=0.2)
    with pytest.raises(ValueError, match="has no examples, expected at least one"):
        prepare(path, tmp_path / "none", split="heldout", client="user", heldout_fraction=1e-9)


def test_columns_whose_names_differ_in_case_keep_their_values(tmp_path: Path) -> None:
    table = pa.table({"user": ["b", "a"], "x": [1, 2], "X": [3, 4], "__fedpax_row": [5, 6]})
    path = write_arrow(table, tmp_path / "a.arrow")
    made = prepare(path, tmp_path / "out", client="user").source
    assert_equal(made, load(path, client="user"))
    assert made.column("X").tolist() == [4, 3]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow"])
def test_a_client_without_examples_has_none(tmp_path: Path, suffix: str) -> None:
    write = {
        "csv": csv.write_csv,
        "parquet": parquet.write_table,
        "arrow": lambda table, path: write_arrow(table, path),
    }[suffix]
    write(pa.table({"x": pa.array([], pa.int64())}), tmp_path / f"a.{suffix}")
    write(pa.table({"x": [1, 2]}), tmp_path / f"b.{suffix}")
    made = prepare(tmp_path / f"*.{suffix}", tmp_path / "out").source
    assert_equal(made, load(tmp_path / f"*.{suffix}"))
    assert made.client_names == ["b"]


def test_a_prepared_folder_is_no_other_split(tmp_path: Path) -> None:
    path = write_arrow(pa.table({"user": [1, 2]}), tmp_path / "a.arrow")
    prepare(path, tmp_path / "out", client="user")
    assert len(load(tmp_path / "out", "train")) == 2
    with pytest.raises(ValueError, match=r"out has no split 'test'. Prepare each split"):
        load(tmp_path / "out", "test")


def test_damaged_folders_are_told(tmp_path: Path) -> None:
    path = write_arrow(pa.table({"user": np.arange(1000) % 7}), tmp_path / "a.arrow")
    prepare(path, tmp_path / "out", client="user")
    with pytest.raises(
        ValueError, match=r"sorted by the client 'user', and client is 'x'|not a column"
    ):
        load(tmp_path / "out", client="x")
    (tmp_path / "in" / "train").parent.mkdir()
    shutil.copytree(tmp_path / "out", tmp_path / "in" / "train")
    assert len(load([tmp_path / "out"])) == 1000
    assert len(load(tmp_path / "in", "train")) == len(load(f"{tmp_path}/in/{{split}}", "train"))
    clients = tmp_path / "in" / "train" / "clients.arrow"
    for damaged, message in [
        ({"name": [0, 1], "start": [0, 2000]}, "its clients do not follow one another"),
        ({"name": [0, 1]}, "is damaged: .*start"),
    ]:
        write_arrow(pa.table(damaged), clients)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "in" / "train")
    content = (tmp_path / "out" / "examples.arrow").read_bytes()
    (tmp_path / "out" / "examples.arrow").write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"out is damaged: .*prepare it again"):
        load(tmp_path / "out")
    (tmp_path / "out" / "prepared.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"prepared.json is not of format 1"):
        load(tmp_path / "out")


@pytest.mark.parametrize("most_rows", [64, 0])
def test_rows_of_many_batches_are_gathered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    monkeypatch.setattr(prepared, "_BATCH_ROWS", 7)
    monkeypatch.setattr(prepared, "_MOST_ROWS", most_rows)
    rng = np.random.default_rng(6)
    columns = {
        "user": rng.integers(0, 40, 300),
        "small": rng.integers(0, 9, 300).astype(np.int8),
        "x": rng.normal(size=300).astype(np.float32),
        "y": rng.normal(size=300),
        "image": rng.integers(0, 9, (300, 2, 2)).astype(np.uint8),
        "photo": rng.integers(0, 256, (300, 17, 19)).astype(np.uint8),
        "signal": rng.normal(size=(300, 71)).astype(np.float32),
    }
    np.savez(tmp_path / "a.npz", **columns)
    source = prepare(tmp_path / "a.npz", tmp_path / "out", client="user").source
    assert len(source.table.to_batches()) > 1
    assert (tmp_path / "out" / "records.bin").exists() == (most_rows > 0)
    order = np.argsort(columns["user"], kind="stable")
    chosen = rng.integers(0, 300, 500)
    taken = source.take(chosen)
    for name, values in columns.items():
        assert taken[name].dtype == values.dtype
        np.testing.assert_array_equal(taken[name], values[order][chosen])


def test_a_description_that_is_cut_off_is_told(tmp_path: Path) -> None:
    """It ended in a JSONDecodeError."""
    path = write_arrow(pa.table({"user": [2, 1], "x": [1, 2]}), tmp_path / "a.arrow")
    prepare(path, tmp_path / "out", client="user")
    (tmp_path / "out" / "prepared.json").write_text('{"format": 1,')
    with pytest.raises(ValueError, match=r"folder .*out is damaged: prepared.json: .*prepare it a"):
        load(tmp_path / "out")
