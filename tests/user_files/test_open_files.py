"""Files as clients: equal to the arrays that were written to them, or refused with a remedy."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, feather, parquet

from fedpax.data import ClientSampler, cohort_rounds, load, partition_natural, prepare
from fedpax.populations.client_arrays import ContiguousClients
from fedpax.user_files.held_out import held_out


def random_table(rng: np.random.Generator, size: int) -> pa.Table:
    hospitals = rng.choice(["Åre", "north", "東京", "b,c"], size)
    age = [
        None if missing else float(a)
        for a, missing in zip(rng.random(size), rng.random(size) < 0.2, strict=True)
    ]
    return pa.table(
        {
            "hospital": hospitals,
            "age": pa.array(age),
            "visits": rng.integers(-5, 1000, size),
            "outcome": rng.integers(0, 2, size),
            "note": [None if r < 0.2 else f'say "{r}",\nand go' for r in rng.random(size)],
        }
    )


def write(table: pa.Table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".gz":
        plain = path.with_suffix("")
        csv.write_csv(table, plain)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    else:
        csv.write_csv(
            table, path, csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        )
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".parquet"])
def test_a_client_has_its_rows_in_order(tmp_path: Path, suffix: str) -> None:
    table = random_table(np.random.default_rng(0), 53)
    source = load(write(table, tmp_path / f"all{suffix}"), client="hospital", label="outcome")
    hospital = np.array(table["hospital"].to_pylist())
    assert source.client_names == sorted(set(hospital))
    assert len(source) == 53 and source.client_starts[-1] == 53
    for k, name in enumerate(source.client_names):
        rows = np.flatnonzero(hospital == name)
        begin, end = source.client_starts[k : k + 2]
        expected = table.take(rows).to_pylist()
        assert [source[i] for i in range(begin, end)] == expected
        assert source.client_table(k).to_pylist() == expected


def test_columns_are_numpy_with_missing_values_masked(tmp_path: Path) -> None:
    table = random_table(np.random.default_rng(1), 40)
    source = load(write(table, tmp_path / "a.parquet"))
    age = source.column("age")
    assert isinstance(age, np.ma.MaskedArray)
    np.testing.assert_array_equal(age.mask, [v is None for v in table["age"].to_pylist()])
    np.testing.assert_array_equal(age.compressed(), table["age"].drop_null())
    visits = source.column("visits")
    assert not isinstance(visits, np.ma.MaskedArray) and visits.dtype == np.int64
    some = source.take([3, -1, 3])
    np.testing.assert_array_equal(some["visits"], visits[[3, -1, 3]])
    np.testing.assert_array_equal(some["age"].mask, age.mask[[3, -1, 3]])
    assert some["hospital"].tolist() == [table["hospital"][i].as_py() for i in (3, 39, 3)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([1, None], pa.int8()), np.int8),
        (pa.array([None, True]), np.bool_),
        (pa.array([None, 2.5], pa.float32()), np.float32),
        (pa.array(["a", None]).dictionary_encode(), object),
        (pa.array([None, 3], pa.date32()), "datetime64[D]"),
        (pa.array([5, None], pa.timestamp("us", "UTC")), "datetime64[us]"),
        (pa.array([b"x", None]), object),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), np.int64),
        (pa.array([None, None], pa.string()), object),
        (pa.array([None, None]), np.float64),
    ],
)
def test_missing_values_of_every_type(tmp_path: Path, values: Any, expected: Any) -> None:
    source = load(write(pa.table({"x": values}), tmp_path / "a.parquet"))
    column = source.column("x")
    assert column.dtype == np.dtype(expected)
    mask = np.ma.getmaskarray(column).reshape(2, -1).all(axis=1)
    assert mask.tolist() == [v is None for v in values.to_pylist()]
    for k in range(2):
        value = values[k].as_py()
        if value is None:
            assert source[k]["x"] is None
        elif not pa.types.is_temporal(values.type):
            np.testing.assert_array_equal(source[k]["x"], value)


def test_each_of_several_files_is_a_client(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    tables = {name: random_table(rng, n) for name, n in [("zürich", 3), ("a b", 8), ("[x]", 1)]}
    for name, table in tables.items():
        write(table, tmp_path / f"{name}.csv")
    source = load(tmp_path / "*.csv")
    assert source.client_names == sorted(tables)
    np.testing.assert_array_equal(
        np.diff(source.client_starts), [len(tables[n]) for n in sorted(tables)]
    )
    assert [example["client"] for example in source] == [
        n for n in sorted(tables) for _ in tables[n]["age"]
    ]
    single = load(tmp_path / "[x].csv")  # a path that exists is itself
    assert len(single) == 1 and single.client_starts is None


def test_paths_name_clients_and_labels(tmp_path: Path) -> None:
    for client, label in [("ann", "cat"), ("ann", "dog"), ("bo", "cat")]:
        for part in range(2):
            write(pa.table({"x": [part]}), tmp_path / "train" / client / f"{label}-{part}.parquet")
    write(pa.table({"x": [7]}), tmp_path / "test" / "bo" / "cat-0.parquet")
    pattern = str(tmp_path / "{split}" / "{client}" / "{label}-*.parquet")
    source = load(pattern, "train", label="label")
    assert source.client_names == ["ann", "bo"] and source.client_starts.tolist() == [0, 4, 6]
    assert source.column("label").tolist() == ["cat", "cat", "dog", "dog", "cat", "cat"]
    assert load(pattern, "test").column("x").tolist() == [7]
    with pytest.raises(ValueError, match=r"split is None.*Give one"):
        load(pattern)


@pytest.mark.parametrize(
    "folder", ["{client}", "{split}", "x{label}y", "corpus[1]", "~walk", "a*b"]
)
def test_a_folder_with_the_characters_of_a_pattern_is_itself(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, x in ((folder, 1), ("xfooy", 9), ("corpus1", 9), ("aab", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.csv").write_text(f"client,x,label\n0,{x},1\n")
    monkeypatch.chdir(tmp_path)
    for pattern in (f"{folder}/*.csv", f"{folder}/one.csv", folder, f"{tmp_path}/{folder}/*.csv"):
        assert load(pattern, client="client").column("x").tolist() == [1]
    for name in ("a", "b"):
        (tmp_path / folder / f"{name}.csv").write_text("x\n1\n")
    (tmp_path / folder / "one.csv").unlink()
    source = load(f"{folder}/{{client}}.csv", client="client")
    assert list(source.column("client")) == ["a", "b"]


def test_clients_of_equal_file_names_are_told_apart_by_folder(tmp_path: Path) -> None:
    for folder in ("north", "south"):
        write(pa.table({"x": [1]}), tmp_path / folder / "data.csv")
    assert load(tmp_path / "*" / "data.csv").client_names == ["north/data", "south/data"]


def test_files_are_clients_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.csv", "a.tsv", "b.csv"):
        (tmp_path / name).write_text("x\n1\n")
    monkeypatch.chdir(tmp_path)
    source = load(["*.csv", "a.tsv", tmp_path / "b.csv"])
    assert sorted(source.client_names) == ["a.csv", "a.tsv", "b"] and len(source) == 3


def test_files_in_a_bucket(tmp_path: Path) -> None:
    import fsspec

    rng = np.random.default_rng(3)
    system = fsspec.filesystem("memory")
    tables = {name: random_table(rng, 9) for name in ("a", "ö")}
    for name, table in tables.items():
        for suffix in (".csv.gz", ".parquet"):
            path = write(table, tmp_path / f"{name}{suffix}")
            system.pipe(f"/bucket/{name}{suffix}", path.read_bytes())
    for suffix in (".csv.gz", ".parquet"):
        local, remote = load(tmp_path / f"*{suffix}"), load(f"memory://bucket/*{suffix}")
        assert remote.table.equals(local.table) and remote.client_names == local.client_names
        named = load(f"memory://bucket/{{client}}{suffix}")
        assert named.client_names == ["a", "ö"]


def test_held_out_shares_are_disjoint_and_independent_of_files_and_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    table = random_table(rng, 2000).append_column("key", pa.array(np.arange(2000)))
    table = pa.concat_tables([table, table.slice(0, 50)])  # duplicates stay on one side
    write(table, tmp_path / "one.parquet")
    shuffled = table.take(rng.permutation(len(table))).select(sorted(table.column_names))
    for k in range(3):
        write(shuffled.slice(k * 700, 700), tmp_path / f"part-{k}.parquet")
    options: Any = {"client": "hospital", "heldout_fraction": 0.1}
    keys = {}
    for split in ("train", "heldout"):
        single = load(tmp_path / "one.parquet", split, **options)
        parts = load(tmp_path / "part-*.parquet", split, **options)
        assert sorted(single.column("key")) == sorted(parts.column("key"))
        keys[split] = set(single.column("key"))
    assert not keys["train"] & keys["heldout"] and len(keys["train"] | keys["heldout"]) == 2000
    assert 150 < len(keys["heldout"]) < 250
    clients = [
        set(
            load(
                tmp_path / "one.parquet",
                split,
                heldout_by="client",
                client="hospital",
                heldout_fraction=0.5,
            ).client_names
        )
        for split in ("train", "heldout")
    ]
    assert not clients[0] & clients[1] and len(clients[0] | clients[1]) == 4


def test_rounds_equal_those_of_the_same_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    x, y, owner = (
        rng.normal(size=(60, 4)).astype(np.float32),
        rng.integers(0, 3, 60),
        rng.integers(0, 7, 60),
    )
    rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)
    write(pa.table({"x": rows, "y": y, "user": owner}), tmp_path / "a.parquet")
    source = load(tmp_path / "a.parquet", client="user")
    population = ContiguousClients(source.client_starts)
    order = np.argsort(owner, kind="stable")
    arrays = {"x": x[order], "y": y[order], "user": owner[order]}
    options: Any = {"sampler": ClientSampler(7, 3), "batch_size": 4, "preprocess": dict}
    files = cohort_rounds(source, population, **options)
    memory = cohort_rounds(arrays, partition_natural(owner[order]), **options)
    for _ in range(3):
        result, expected = next(files), next(memory)
        for name, values in expected.batches.items():
            np.testing.assert_array_equal(result.batches[name], values)
    assert partition_natural(source, "user").names == sorted(set(owner.tolist()))


def test_the_same_examples_are_held_out_in_every_version() -> None:
    assert int(held_out(pa.table({"x": np.arange(10_000)}), 0.05).sum()) == 551
    texts = pa.table({"x": [None if k == 3 else f"å{k % 999}" for k in range(10_000)]})
    expected = held_out(texts, 0.1)
    assert int(expected.sum()) == 981
    for kind in (pa.large_string(), pa.dictionary(pa.int16(), pa.string())):
        chunks = pa.chunked_array([texts["x"].slice(0, 7), texts["x"].slice(7)]).cast(kind)
        np.testing.assert_array_equal(held_out(pa.table({"x": chunks}), 0.1), expected)
    content = texts["x"].fill_null("missing").cast(pa.binary())
    np.testing.assert_array_equal(held_out(pa.table({"x": content}), 0.1), expected)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab京"), st.integers(-9, 9)), min_size=1, max_size=30),
    st.data(),
)
def test_files_cover_all_rows_once(tmp_path_factory: Any, rows: list[Any], data: Any) -> None:
    folder = tmp_path_factory.mktemp("rows")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    pieces = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    for k, piece in enumerate(pieces):
        table = pa.table(
            {
                "c": pa.array([c for c, _ in piece], pa.string()),
                "x": pa.array([x for _, x in piece], pa.int64()),
            }
        )
        write(table, folder / f"{k}.parquet")
    source = load(folder / "*.parquet", client="c")
    assert [(r["c"], r["x"]) for r in source] == sorted(rows, key=lambda row: row[0])


def test_an_absent_split_names_the_splits_that_exist(tmp_path: Path) -> None:
    for split in ("train", "held out"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.csv").write_text("x\n1\n")
    pattern = f"{tmp_path}/{{split}}/{{client}}.csv"
    words = r"is of the split 'test', expected one of 'held out', 'train'.* --data\.heldout_split"
    with pytest.raises(FileNotFoundError, match=words):
        load(pattern, "test")
    with pytest.raises(FileNotFoundError, match=r"No file matches .*\.tsv"):
        load(f"{tmp_path}/{{split}}/{{client}}.tsv", "test")


def test_a_path_is_no_name_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets" / "cats").mkdir(parents=True)
    (tmp_path / "pets" / "cats" / "a.jpg").write_bytes(b"")
    for name in ("./pets", "pets/cats", str(tmp_path / "pets")):
        with pytest.raises(FileNotFoundError, match=r"has no data set.*patterns such as '.*\.jpg'"):
            load(name)
    for name in ("./dogs", "../dogs", "/dogs"):
        with pytest.raises(FileNotFoundError, match="No file matches"):
            load(name, "train")
    for split in (None, "train"):  # such a folder can be a run's, and the name TFDS's
        with pytest.raises(ValueError, match=r"folder pets, name them, such as 'pets/\{client\}/"):
            load("pets", split, data_dir=tmp_path / "data")


def test_a_name_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    for name in ("b\udcff.csv", "b\udcff.npz"):
        try:
            (tmp_path / name).write_bytes(b"x\n1\n")
        except OSError:
            pytest.skip("this file system takes names in UTF-8 alone")
        with pytest.raises(ValueError, match=r"has a name that is not UTF-8.*Rename"):
            load(tmp_path / name)


def test_types_replace_what_the_parser_finds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfzip,x\n00123,1\n00124,NA\n")
    assert load(tmp_path / "a.csv").column("zip").tolist() == [123, 124]
    source = load(tmp_path / "a.csv", types={"zip": "string"}, client="zip")
    assert source.client_names == ["00123", "00124"]
    assert source[1] == {"zip": "00124", "x": None}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet", "arrow", "npz"])
def test_types_can_name_columns_that_are_left_out(tmp_path: Path, suffix: str) -> None:
    file, columns = tmp_path / f"a.{suffix}", {"x": [1, 3], "y": [2, 4]}
    rows = zip(columns["x"], columns["y"], strict=True)
    lines = [json.dumps({"x": x, "y": y}) for x, y in rows]
    if suffix == "parquet":
        parquet.write_table(pa.table(columns), file)
    elif suffix == "arrow":
        feather.write_feather(pa.table(columns), str(file))
    elif suffix == "npz":
        np.savez(file, **columns)
    else:
        texts = {"csv": "x,y\n1,2\n3,4\n", "jsonl": "\n".join(lines)}
        file.write_text(texts.get(suffix, f"[{','.join(lines)}]"))
    read: Any = {"columns": ["x"], "types": {"y": "string"}}
    for source in (load(file, **read), prepare(file, tmp_path / "out", **read).source):
        assert source.fields == ("x",) and source[1] == {"x": 3}
    for run in (load, lambda *given, **read: prepare(*given, tmp_path / "wrong", **read)):
        with pytest.raises(ValueError, match=r"'z'.* not a column|has no column 'z'"):
            run(file, columns=["x"], types={"z": "string"})


def test_types_of_columns_that_are_left_out_and_that_only_late_lines_have(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 3, "y": 4}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 5, "y": "late"}\n')
    read: Any = {"columns": ["x"], "types": {"y": "string"}}
    source = load([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], **read)
    assert source.fields == ("x", "client") and source.column("x").tolist() == [1, 3, 5]


@pytest.mark.parametrize("options", [{}, {"columns": ["x", "y"]}, {"label": "y"}])
def test_optional_columns_that_options_name(tmp_path: Path, options: Any) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("x\n3\n")
    given: Any = {"optional_columns": ["y"], "types": {"y": "string"}, **options}
    source = load(tmp_path / "*.csv", **given)
    assert source.table.column("y").to_pylist() == ["2", None]
    out = prepare(tmp_path / "*.csv", tmp_path / "out", **given)
    assert out.source.table.column("y").to_pylist() == ["2", None]


def test_files_that_exceed_the_memory_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"x": np.zeros(100_000)})  # 1 KB in the file
    write(table, tmp_path / "a.parquet")
    monkeypatch.setattr("fedpax.user_files.file_sizes._available_bytes", lambda: 1000)
    message = r"takes about 0.0 GB of memory.*fedpax prepare '.*a.parquet' --out=FOLDER"
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "a.parquet")
    assert len(load(tmp_path / "a.parquet", columns=["x"])) == 100_000
    monkeypatch.setattr("fedpax.user_files.file_sizes._available_bytes", lambda: None)
    assert len(load(tmp_path / "a.parquet")) == 100_000


def test_a_missing_client_is_not_a_group(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("c,x\n1,1\n,2\n")
    with pytest.raises(ValueError, match="'c' is missing in example 1"):
        partition_natural(load(tmp_path / "a.csv"), "c")


def test_missing_values_do_not_reach_a_round(tmp_path: Path) -> None:
    source = load(write(pa.table({"x": [1.0, None, 2.0]}), tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match="mask"):
        rounds = cohort_rounds(
            source, [np.array([0, 1])], ClientSampler(1, 1), batch_size=2, preprocess=dict
        )
        next(rounds)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_clients_beyond_int64_stay_different(tmp_path: Path, name: str) -> None:
    """Parsers read such numbers as floats, in which neighbors are equal."""
    rng = np.random.default_rng(4)
    clients = sorted({2**64 - int(k) for k in rng.integers(1, 3000, 20)})
    lines = {
        "a.csv": "user,x\n" + "".join(f"{c},1\n" for c in clients),
        "a.jsonl": "".join(f'{{"user": {c}, "x": 1}}\n' for c in clients),
        "a.json": json.dumps([{"user": c, "x": 1} for c in clients]),
    }
    (tmp_path / name).write_text(lines[name])
    if name != "a.json":
        for read in (load, lambda *args, **kwargs: prepare(*args, tmp_path / "out", **kwargs)):
            with pytest.raises(ValueError, match=r"holds integers up to 9007199254740992.*uint64"):
                read(tmp_path / name, client="user")
    source = load(tmp_path / name, client="user", types={"user": "uint64"})
    assert source.client_names == clients


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_clients_of_both_zeros_are_one(tmp_path: Path, dtype: Any) -> None:
    numbers = np.random.default_rng(0).choice(np.array([0.0, -0.0, -1.5, 2.0], dtype), 60)
    parquet.write_table(pa.table({"c": numbers, "x": np.arange(60)}), tmp_path / "a.parquet")
    expected = np.argsort(numbers, kind="stable")
    for source in (
        load(tmp_path / "a.parquet", client="c"),
        prepare(tmp_path / "a.parquet", tmp_path / "out", client="c").source,
        load({"c": numbers, "x": np.arange(60)}, client="c"),
        load(pa.table({"c": pa.array(numbers).dictionary_encode(), "x": range(60)}), client="c"),
    ):
        assert [*source.client_names] == [-1.5, 0.0, 2.0]
        np.testing.assert_array_equal(source.column("x"), expected)
        assert not np.signbit(source.column("c")[source.column("c") == 0]).any()
