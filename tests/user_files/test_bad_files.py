"""Tests of messages on files, columns and options that are wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.data import load, prepare
from fedpax.user_files.readers import csv_files


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"a.csv": "x,y\n1,2\n"}, {"client": "z"}, r"client='z' is not a column of .*'x', 'y'"),
        ({"a.csv": "x,y\n1,2\n"}, {"label": "z"}, r"label='z' is not a column of .*'x', 'y'"),
        (
            {"a.csv": "x,y\n1,2\n"},
            {"columns": ["q"]},
            r"a.csv has no column 'q', expected one of 'x'",
        ),
        (
            {"a.csv": "x,y\n1,2\n3\n"},
            {},
            r"a.csv cannot be read as csv: its row 3 has 1 column, expected 2 .*'3'. Correct it",
        ),
        ({"a.csv": "x,y\n"}, {}, r"has no examples"),
        ({"a.csv": "x;y\n1;2,5\n"}, {}, r"one column, 'x;y'.*Set delimiter=';'"),
        ({"a.csv": "c\nNaN\n1.5\n"}, {"client": "c"}, r"'c' .*has no value in 1 example"),
        ({"a.csv": ""}, {}, r"a.csv is empty, expected at least one example. Leave the file out"),
        ({"a.csv": "x,x\n1,2\n"}, {}, r"several columns named 'x'.*Rename"),
        ({"a.csv": "x;y\n1;2\n"}, {}, r"one column, 'x;y'.*Set delimiter=';'"),
        (
            {"a.csv": "c,x\n,2\nb,1\n"},
            {"client": "c"},
            r"'c' .*has no value in 1 example.*example 0",
        ),
        (
            {"a.csv": "c,x\na,2\nb,1\n", "b.csv": "c,x\na,2\n,1\nb,1\n"},
            {"client": "c"},
            r"'c' of .*/b.csv has no value in 1 example, such as example 1, counted from 0",
        ),
        (
            {"a.csv": "c,x\n7,2\n 007,1\n"},
            {"client": "c"},
            r"'c' of clients has the value '007', .*as the number 7. Set types=\{'c': 'string",
        ),
        (
            {"a.csv": "c;x\na;2,5\nb;1.234,5\n"},
            {"delimiter": ";", "decimal_point": ",", "types": {"x": "float64"}},
            r"a.csv .*'x' has numbers with thousands separators, such as '1.234,5'. Write them",
        ),
        (
            {"a.csv": "x,y\n1,2\n", "b.csv": "x\n1\n"},
            {},
            r"b.csv has no column 'y', which .*a.csv has",
        ),
        (
            {"a.csv": "x\n1\n", "b.csv": "x\nu\n"},
            {},
            r"'x' is int64 in .*a.csv and string in .*b.csv",
        ),
        (
            {"a.csv": "x\n9007199254740993\n", "b.csv": "x\n0.5\n"},
            {},
            r"'x' is int64 in one file and double for all files, which does not hold its values",
        ),
        ({"a.csv": "client\n1\n", "b.csv": "client\n2\n"}, {}, r"Set client='client' if"),
        ({"a.csv": "x\n1\n"}, {"split": "test"}, r"no split 'test'. Write \{split\}"),
        ({"a.csv": "x\n1\n"}, {"split": "q", "heldout_fraction": 0.5}, r"split is 'q', expected"),
        ({"a.csv": "x\n1\n"}, {"heldout_fraction": 0.5}, r"split is None.*Set split='train'"),
        ({"a.csv": "x\n1\n"}, {"heldout_fraction": 1.5}, r"heldout_fraction is 1.5"),
        (
            {"a.csv": "x\n1\n"},
            {"heldout_by": "client", "heldout_fraction": 0.1, "split": "train"},
            r"heldout_by='client' is not a column of .*or one of 'x'",
        ),
        ({"a.csv": "x\n1\n"}, {"types": {"x": "nothing"}}, r"'nothing' of column 'x' is not a"),
        ({"a.parquet": "PAR1 and no more"}, {}, r"a.parquet cannot be read as parquet"),
        ({"a.xlsx": "x"}, {}, r"suffix '.xlsx', expected one of .csv"),
        ({"a.csv": "version https://git-lfs.github.com/spec/v1\n"}, {}, r"Git LFS pointer"),
    ],
)
def test_what_is_wrong_is_told_with_a_remedy(
    tmp_path: Path, files: dict[str, str], options: Any, message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / ("*" if len(files) > 1 else next(iter(files))), **options)


def test_a_folder_does_not_name_the_one_above_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (tmp_path / "in" / "dataset_dict.json").write_text('{"splits": [".."]}')
    with pytest.raises(ValueError, match=r"names '\.\.', expected a file or folder beside it"):
        load(tmp_path / "in")


def test_a_mask_is_no_list_of_indices() -> None:
    source = load({"x": [5, 6, 7]})
    with pytest.raises(TypeError, match=r"of type bool, expected integers.*np.flatnonzero"):
        source.take([False, True, True])
    assert source.take([])["x"].tolist() == [] and source.take([-1])["x"].tolist() == [7]


def test_missing_files_and_options_of_files_for_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No file matches .*\*.csv"):
        load(tmp_path / "*.csv")
    for nothing in (3, [], b"x", [3]):
        with pytest.raises((ValueError, TypeError), match="expected the name of a data set, files"):
            load(nothing)
    with pytest.raises(ValueError, match="client='a' is for files, but 'digits' is the name"):
        load("digits", "train", client="a")
    with pytest.raises(ValueError, match=r"The split of the data set 'digits' is None"):
        load("digits")


def test_a_misspelt_file_is_missing_and_no_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p4").mkdir()
    (tmp_path / "p4" / "h000.csv").write_text("age,died\n70,1\n")
    for options in ({}, {"label": "died"}):
        with pytest.raises(FileNotFoundError, match=r"no file 'p4/h000.cvs'.* p4: h000\.csv\."):
            load("p4/h000.cvs", **options)
        with pytest.raises(FileNotFoundError, match=r"no file 'h000.cvs'. Check it with ls"):
            load("h000.cvs", **options)
    with pytest.raises(ValueError, match=r"is the name of a data set.*csv'\.$"):
        load("c4/en:3.1.0", "train", label="died")


@pytest.mark.parametrize("options", [{}, {"label": "died"}])
def test_the_folder_that_a_path_lacks_is_named(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for name in ("nowhere/x", "nowhere/"):
        with pytest.raises(ValueError, match=r"data set.* path of files: there is no f.*'nowhere'"):
            load(name, **options)
    for name, missing in (
        ("nowhere/x.csv", "folder nowhere"),
        ("nowhere/*.csv", "folder nowhere"),
        (f"{tmp_path}/here/below/{{client}}/*.csv", f"folder {tmp_path}/here/below"),
        (f"{tmp_path}/here/below", f"file or folder {tmp_path}/here/below"),
    ):
        with pytest.raises(FileNotFoundError, match=rf"No file.*: there is no {missing}\. Check"):
            load(name, **options)
    with pytest.raises(FileNotFoundError, match="Quote a pattern"):
        load("here/*.csv", **options)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_encodings_are_told(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.csv").write_bytes("name,x\nZoë,1\n".encode(encoding))
    for read in (load, lambda path: prepare(path, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"a.csv cannot be read.*not UTF-8.*iconv -f"):
            read(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_bytes(b"name,x\nZoe,1\n")
    assert load(tmp_path / "b.csv")[0]["name"] == "Zoe"


def test_clients_with_leading_zeros_are_told_or_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.integers(1, 400, 2000)
    padded = [f"{n:0{rng.integers(1, 4)}}" if k > 1900 else str(n) for k, n in enumerate(numbers)]
    lines = [f"{c},{k}" for k, c in enumerate(padded)]
    (tmp_path / "a.csv").write_text("\n".join(["c,x,", *lines]).replace("c,x,", "c,x") + "\n")
    monkeypatch.setattr(csv_files, "_BLOCK", 1024)  # the zeros come late
    for read in (load, prepare):
        out = () if read is load else (tmp_path / "out",)
        with pytest.raises(ValueError, match=r"'c' of clients has the value '0\d+', read as the"):
            read(tmp_path / "a.csv", *out, client="c")
    for kind, values in (("string", padded), ("int64", numbers)):
        source = load(tmp_path / "a.csv", client="c", types={"c": kind})
        again = prepare(tmp_path / "a.csv", tmp_path / kind, client="c", types={"c": kind}).source
        assert list(source.client_names) == list(again.client_names) == sorted(set(values))
    skipping = {"client": "c", "types": {"x": "int64"}, "on_bad_row": "skip"}
    (tmp_path / "b.csv").write_text("c,x\n1,2\n3\n4,5\n")
    prepared = prepare(tmp_path / "b.csv", tmp_path / "b", **skipping)
    assert list(prepared.skipped.values()) == [1]


@pytest.mark.parametrize(
    ("clients", "told"),
    [
        (["31", "0x1F"], r"the value '0x1F', read as the number 31"),
        (["1e3", "7", "1000"], r"the values '1e3' and '1000', read as the number 1000"),
        (["1.1", "1.10", "2.5"], r"the values '1.1' and '1.10', read as the number 1.1"),
        (["1,1", "1,10"], r"the values '1,1' and '1,10'"),
        (["1e400", "2e400"], r"the values '1e400' and '2e400', read as the number inf"),
        (["5", " 5", "6"], None),
        (["0.5", "-0.5", "0"], None),
        (["1.0", "2.0", ""], None),
    ],
)
def test_different_clients_are_not_one_number(
    tmp_path: Path, clients: list[str], told: str | None
) -> None:
    rows = [f"{client};{k}" for k, client in enumerate(clients) if client]
    (tmp_path / "a.csv").write_text("\n".join(["c;x", *rows, *rows]) + "\n")
    given: Any = {
        "client": "c",
        "delimiter": ";",
        "decimal_point": "," if "1,1" in clients else ".",
    }
    for read in (load, lambda file, **given: prepare(file, tmp_path / "out", **given).source):
        if told is None:
            assert len(read(tmp_path / "a.csv", **given).client_names) == 2 + ("-0.5" in clients)
            continue
        with pytest.raises(ValueError, match=told + r".*types=\{'c': 'string'\}"):
            read(tmp_path / "a.csv", **given)
        as_text = load(tmp_path / "a.csv", types={"c": "string"}, **given)
        assert list(as_text.client_names) == sorted(clients)


def test_arrays_name_no_client(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", c=np.zeros((2, 3)), x=np.arange(2))
    for read in (load, lambda file, **given: prepare(file, tmp_path / "out", **given)):
        with pytest.raises(ValueError, match=r"column 'c' of .* expected texts or numbers"):
            read(tmp_path / "a.npz", client="c")
