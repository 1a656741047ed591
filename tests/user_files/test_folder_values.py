"""Folders such as `day=2026-01-01`, as Hive, Spark and DuckDB write the parts of a table."""

import datetime
from pathlib import Path

import duckdb
import numpy as np
import pytest

from fedpax.data import load, prepare

ROWS = (
    "select 'u' || (i % 3) as user, i::BIGINT as x, "
    "date '2026-01-01' + (i % 4)::INT as day, ['Zoë/ä', 'a b', '007'][1 + i % 3] as country "
    "from range(24) t(i)"
)


@pytest.fixture(params=["parquet", "csv", "json"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder, kind = tmp_path / "run=3" / "events", request.param
    folder.parent.mkdir()
    duckdb.sql(f"copy ({ROWS}) to '{folder}' (format {kind}, partition_by (day, country))")
    if kind == "json":
        for path in folder.rglob("*.json"):
            path.rename(path.with_suffix(".jsonl"))
    return f"{folder}/*/*/*"


def rows_of(source) -> list[tuple]:
    return sorted(zip(*(source.column(n) for n in ("x", "user", "country", "day")), strict=True))


EXPECTED = sorted(
    (i, f"u{i % 3}", ["Zoë/ä", "a b", "007"][i % 3], f"2026-01-0{1 + i % 4}") for i in range(24)
)


def test_folders_are_columns_in_memory_and_prepared(parts: str, tmp_path: Path) -> None:
    source = load(parts, client="user")
    assert {*source.fields} == {"user", "x", "day", "country"}  # not run=3, above the pattern
    assert rows_of(source) == EXPECTED
    listed = sorted(map(str, Path(parts[:-6]).rglob("*.*")))
    assert rows_of(load(listed, client="user")) == EXPECTED
    assert rows_of(prepare(parts, tmp_path / "out", client="user").source) == EXPECTED
    if not parts.startswith("*.json"):
        assert rows_of(load(parts[:-6], client="user")) == EXPECTED
    assert load(parts, client="country").client_names == ["007", "Zoë/ä", "a b"]


def test_types_and_columns_choose_among_folders(parts: str, tmp_path: Path) -> None:
    types = {"day": "date32"}
    days = load(parts, client="user", types=types).table.column("day").to_pylist()
    assert {*days} == {datetime.date(2026, 1, 1 + k) for k in range(4)}
    prepared = prepare(parts, tmp_path / "out", client="user", types=types)
    assert prepared.source.table.column("day").to_pylist() == days
    some = load(parts, client="user", columns=["x", "day"])
    assert {*some.fields} == {"x", "day", "user"}
    with pytest.raises(ValueError, match=r"types: the path's 'country' is no int64"):
        load(parts, client="user", types={"country": "int64"})
    with pytest.raises(ValueError, match=r"are parts of paths, expected also a column"):
        load(parts, columns=["day"])


def test_folders_that_differ_or_repeat_a_column(tmp_path: Path) -> None:
    for folder in ("day=1", "day=2", "hour=1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.csv").write_text("x,y\n1,2\n")
    assert load(f"{tmp_path}/day*/*.csv", client="day").client_names == ["1", "2"]
    with pytest.raises(ValueError, match=r"is in a folder day=\.\.\., and .*hour=1"):
        load(f"{tmp_path}/*/*.csv", client="y")
    (tmp_path / "day=2" / "a.csv").write_text("x,day\n1,2\n")
    with pytest.raises(ValueError, match=r"has a column 'day', and its path has 'day' too"):
        load(f"{tmp_path}/day=2*/*.csv", client="x")


def test_placeholders_come_first_and_null_is_missing(tmp_path: Path) -> None:
    for name, number in (("ann", 1), ("bo", 2)):
        for day in ("5", "__HIVE_DEFAULT_PARTITION__"):
            folder = tmp_path / f"user={name}" / f"day={day}"
            folder.mkdir(parents=True)
            (folder / "0.csv").write_text(f"x\n{number}\n")
    source = load(f"{tmp_path}/user={{client}}/*/*.csv")
    assert source.client_names == ["ann", "bo"] and {*source.fields} == {"client", "x", "day"}
    assert sorted(map(str, source.table.column("day").to_pylist())) == ["5", "5", "None", "None"]
    np.testing.assert_array_equal(source.column("x"), [1, 1, 2, 2])


def test_a_folder_with_the_name_of_the_split_is_a_column(tmp_path: Path) -> None:
    for fold in ("train", "7"):
        folder = tmp_path / "all" / f"fold={fold}" / "day=7"
        folder.mkdir(parents=True)
        rows = "".join(f"{k},u{k % 3}\n" for k in range(40))
        (folder / "0.csv").write_text(f"x,user\n{rows}")
    for files in (f"{tmp_path}/all/*/*/*.csv", f"{tmp_path}/all"):
        parts = [
            load(files, split, client="user", heldout_fraction=0.3)
            for split in ("train", "heldout")
        ]
        for part in parts:
            assert {*part.column("fold")} == {"train", "7"} and {*part.column("day")} == {"7"}
        assert sum(map(len, parts)) == 80
    # {split} and {client} state what a folder is
    some = load(f"{tmp_path}/all/fold={{split}}/*/*.csv", "train", client="user")
    assert {*some.fields} == {"x", "user", "day"} and len(some) == 40
    some = load(f"{tmp_path}/all/fold={{client}}/*/*.csv")
    assert some.client_names == ["7", "train"] and {*some.column("day")} == {"7"}
    (tmp_path / "all" / "fold=train").rename(tmp_path / "all" / "split=train")
    (tmp_path / "all" / "fold=7").rename(tmp_path / "all" / "split=test")
    some = load(tmp_path / "all", "test", client="user")
    assert {*some.fields} == {"x", "user", "day"} and len(some) == 40


def test_another_name_in_braces_is_told_with_the_pattern_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1" / "a.csv").write_text("x\n1\n")
    with pytest.raises(
        FileNotFoundError, match=r"\{day\} is no placeholder.*such as .*/day=\*/\*'"
    ):
        load(f"{tmp_path}/day={{day}}/*")
