"""Tests of messages on files whose contents are not what their names say, and on damaged CSV."""

import gzip
import io
import logging
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedpax.data import load, prepare
from fedpax.data.tables.survey import survey_files
from fedpax.user_files.formats import LoadOptions
from fedpax.user_files.readers import csv_files

_ROWS = "".join(f"{k},n{k},{k % 2}\n" for k in range(20))
_TABLE = "age,note,outcome\n" + _ROWS


def _zipped(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, _TABLE)
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            gzip.compress(_TABLE.encode()),
            r"by gzip, expected csv. Rename it to .*a.csv.gz",
        ),
        ("a.csv.gz", _TABLE.encode(), r"is not compressed, .*Rename it to .*a.csv, or copy"),
        ("a.csv", _zipped("a.csv"), r"a.csv is a zip archive, expected csv. Extract it"),
        (
            "a.csv",
            _zipped("xl/workbook.xml"),
            r"is an Excel file, .*as CSV in UTF-8, or .*read_exc",
        ),
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), r"a.csv is an Excel file"),
        ("a.csv", b"<!DOCTYPE html>\n<p>Sign in</p>\n", r"a.csv is an HTML page, such as a page"),
        ("a.csv", b"\n<html>\n<p>Sign in, now</p>\n", r"a.csv is an HTML page, such as a page"),
        ("a.jsonl", b"<html><p>Sign in</p></html>", r"a.jsonl is an HTML page, .*expected jsonl"),
        ("a.parquet", b"<html><p>Sign in</p></html>", r"a.parquet is an HTML page"),
        ("a.parquet", _TABLE.encode(), r"a.parquet cannot be read as parquet"),
        ("a.csv", b"\n \n", r"a.csv is empty, expected at least one example. Leave the file out"),
        ("a.xlsx", _zipped("xl/workbook.xml"), r"suffix '.xlsx', .*Save it as CSV in UTF-8"),
        ("a.csv.zip", _zipped("a.csv"), r"suffix '.zip', .*Extract the archive"),
        ("a.txt", _TABLE.encode(), r"suffix '.txt', .*Rename a table to .csv, and set delimiter="),
        ("a.txt", b"A text.\n", r'Write texts as .jsonl, one {"text": "..."} in each line'),
        (
            "a.csv",
            ("# of 2024\n\n" + _TABLE).encode(),
            r"its line 1, '# of 2024', is read as the names .*its line 3, 'age,.*`tail -n \+3 ",
        ),
        (
            "a.csv",
            ("North, a report\n" + _TABLE).encode(),
            r"line 1, 'North, a report', .*its line 2, 'age,.*`tail -n \+2 ",
        ),
        ("a.csv", b"North,,\n" + _TABLE.encode(), r"named '', .*remove a title above the names"),
        (
            "a.csv",
            (_TABLE + '40,"pipe,1\n' + _ROWS).encode(),
            r"row 22 has 2 columns, expected 3 .*'40,\"pipe,1' opens a quote that its line",
        ),
    ],
)
def test_contents_that_are_no_table_are_told(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for read in (load, lambda path: prepare(path, tmp_path / "out")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)


@pytest.mark.parametrize("place", [0, 3, 1500])
def test_the_line_that_is_not_utf8_is_told(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 4096)  # prepare reads the line with a later block
    rng = np.random.default_rng(place)
    lines = ["name,x", *(f"n{k},{k}" for k in rng.integers(0, 999, 2000))]
    lines[place] = "Zoë," + lines[place].partition(",")[2]
    (tmp_path / "a.csv").write_bytes("\n".join(lines).encode("cp1252"))
    told = rf"not UTF-8 in line {place + 1}, which as WINDOWS-1252 .*Zoë,.*iconv -f WINDOWS-1252"
    for read in (load, lambda path: prepare(path, tmp_path / "out")):
        with pytest.raises(ValueError, match=told):
            read(tmp_path / "a.csv")


def test_all_lines_of_an_open_quote_are_counted_where_rows_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(_TABLE + '40,"pipe,1\n' + _ROWS)
    made = prepare(tmp_path / "a.csv", tmp_path / "out", on_bad_row="skip")
    assert made.skipped == {str(tmp_path / "a.csv"): 21} and made.num_examples == 20


@pytest.mark.parametrize("reader", ["load", "prepare", "survey_files"])
def test_a_file_without_examples_among_others_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reader: str
) -> None:
    (tmp_path / "a.csv").write_text(_TABLE)
    (tmp_path / "b.csv").write_text("age,note,outcome\n")
    with caplog.at_level(logging.WARNING):
        if reader == "load":
            names = load(tmp_path / "*.csv").client_names
        elif reader == "prepare":
            names = prepare(tmp_path / "*.csv", tmp_path / "out").source.client_names
        else:
            options = LoadOptions(label="outcome")
            names = survey_files(str(tmp_path / "*.csv"), options, 9).clients.to_pylist()
    assert list(names) == ["a"]
    assert caplog.text.count("b.csv has no examples.") == 1
