"""What is told of CSV whose writer meant another table than the one that is read."""

import gzip
from pathlib import Path

import pytest

from fedpax.data import load
from fedpax.data.tables import survey
from fedpax.main import main
from fedpax.user_files.readers import csv_files

ROWS = [f"{k},n{k},{k + 0.5}" for k in range(40)]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(20, 21), (3, 30)])
def test_quotes_that_join_rows_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    large: bool,
    begin: int,
    end: int,
) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 256)
    if large:
        monkeypatch.setattr(survey, "_LARGE", 0)
    rows = [*ROWS]
    rows[begin], rows[end] = f'{begin},"open,0.5', f'{end},close",0.5'
    (tmp_path / "a.csv").write_text("\n".join(["age,note,dose", *rows]) + "\n")
    assert main(["data", str(tmp_path / "a.csv")]) == 0
    (told,) = [text for text in caplog.messages if "a quote is open by mistake" in text]
    assert f"value of 'note' in example {begin}, counted from 0" in told
    assert f"has {end - begin + 1} lines with the delimiters of" in told


@pytest.mark.parametrize("place", [0, 1])
def test_quotes_that_join_rows_of_two_columns_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    rows = [["note", "dose"], *[[f"n{k}", str(k)] for k in range(40)]]
    rows[20][0], rows[30][0] = '"open', 'close"'
    lines = [",".join(row if place == 0 else row[::-1]) for row in rows]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    assert len(load(tmp_path / "a.csv")) == 30
    (told,) = caplog.messages
    assert "value of 'note' in example 19, counted from 0, has 11 lines with the delim" in told
    assert "a quote is open by mistake" in told


def test_texts_with_lines_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = ['1,"Dear Ann,\nthank you, all",0.5', '2,"a\nb",1', '3,"x, y\n1, 2\n",1']
    (tmp_path / "a.csv").write_text("\n".join(["age,note,dose", *texts]) + "\n")
    (tmp_path / "b.csv").write_text('age,note\n1,"Hi\nJohn, bye"\n')
    (tmp_path / "c.csv").write_text('who,note\nAnn,"Hi\nJohn,bye"\n')
    (tmp_path / "d.csv").write_text('note,age\n"Room, 5\nfloor, 7\nend",1\n')
    for name, examples in (("a.csv", 3), ("b.csv", 1), ("c.csv", 1), ("d.csv", 1)):
        assert len(load(tmp_path / name)) == examples
    assert not caplog.messages


@pytest.mark.parametrize(
    ("lines", "is_told"),
    [
        (["age dose", "1 2", "3 4"], True),
        (["full name", "Ann Lee", "Bo von Ek"], False),
        (["name", "Ann", "Bo"], False),
    ],
)
def test_columns_between_spaces_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: list[str], is_told: bool
) -> None:
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    load(tmp_path / "a.csv")
    assert any("set the delimiter to ' '" in text for text in caplog.messages) == is_told
    if is_told:
        assert load(tmp_path / "a.csv", delimiter=" ").column("dose").tolist() == [2, 4]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("name", "head", "value"),
    [("b.csv", 'note;"ag,e"', "old"), ("0.tsv.gz", "note\tag,e", "12 years")],
)
def test_a_value_of_another_type_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    large: bool,
    name: str,
    head: str,
    value: str,
) -> None:
    if large:
        monkeypatch.setattr(survey, "_LARGE", 0)
    mark = head[4]
    (tmp_path / "a.csv").write_text(f'note{mark}"ag,e"\n' + f"x{mark}1\n" * 9)
    rows = [f'"two\nlines"{mark}1', f"x{mark}NA", f"x{mark}", f"x{mark} 7", f"x{mark}{value}"]
    text = "\n".join([head, *[f"x{mark}3"] * 5000, *rows]) + "\n"
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    flags = [] if mark == "\t" else [f"--delimiter={mark}"]
    if mark == "\t":
        (tmp_path / "a.csv").rename(tmp_path / "a.tsv")
    assert main(["data", f"{tmp_path}/*", *flags]) == 2
    told = f"expected one type: line 5007 of {tmp_path / name} has '{value}'."
    assert told in capsys.readouterr().err


def test_a_number_with_a_point_is_no_misfit_among_integers(tmp_path: Path) -> None:
    """The message named 1.5, which a column of integers in another file allows."""
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x\n1.5\nabc\n")
    with pytest.raises(ValueError, match=r"expected one type: line 3 of .*b.csv has 'abc'"):
        load(tmp_path / "*.csv")


@pytest.mark.parametrize("delimiter", [None, ";"])
@pytest.mark.parametrize("names", ["x;y", "x;y;z"])
def test_a_first_line_for_spreadsheets_is_told(
    tmp_path: Path, delimiter: str | None, names: str
) -> None:
    """With delimiter=';' the columns were 'sep=' and ''."""
    (tmp_path / "a.csv").write_text(f"sep=;\n{names}\n" + names.replace("x", "1") + "\n")
    with pytest.raises(ValueError, match=r"its first line, 'sep=;', tells .* `tail -n \+2 .*=';'"):
        load(tmp_path / "a.csv", delimiter=delimiter)


def test_clients_without_a_name_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text('site,x\n"",1\nb,2\n"",4\n')
    load(tmp_path / "a.csv", client="site")
    (told,) = caplog.messages
    assert "The column 'site' of" in told and "is the empty text in 2 examples, which are" in told
