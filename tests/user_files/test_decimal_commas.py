"""Numbers with decimal commas are read where they are stated, and told where they are not."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from user_files.written_tables import assert_equal

from fedpax.commands.parts.options import configure
from fedpax.data import load, prepare
from fedpax.data.tables import survey
from fedpax.main import main
from fedpax.user_files.readers import csv_files

OPTIONS: Any = {"delimiter": ";", "decimal_point": ","}
FLAGS = ("--delimiter=;", "--decimal_point=,")


def write(path: Path, rows: list[list[str]]) -> Path:
    lines = ["user;x;y", *(";".join([f"u{k % 3}", *row]) for k, row in enumerate(rows))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# A larger integer beside floats raises: see test_types_of_columns.
NUMBERS = st.none() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False)
ROWS = st.lists(st.tuples(NUMBERS, st.floats(allow_nan=False)), min_size=1, max_size=30)


@given(rows=ROWS)
def test_commas_equal_points_bitwise(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    folder = tmp_path_factory.mktemp("files")
    texts = [["" if value is None else str(value) for value in row] for row in rows]
    points = write(folder / "points.csv", texts)
    commas = write(folder / "commas.csv", [[t.replace(".", ",") for t in row] for row in texts])
    expected = load(points, client="user", delimiter=";")
    actual = load(commas, client="user", **OPTIONS)
    assert actual.table.schema == expected.table.schema
    for name in ("x", "y"):
        a, b = (np.ma.filled(s.column(name), 0) for s in (actual, expected))
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    assert_equal(prepare(commas, folder / "out", client="user", **OPTIONS).source, actual)


TOLD = [
    (["1,5", "", "-2"], {}, r"'x' has the value '1,5'.*Set decimal_point=','.*'x': 'string'"),
    (["3", ",5", "1,5e-3"], {}, r"'x' has the value ',5'.*Set decimal_point=','"),
    (["12,500", "7"], {}, r"Set decimal_point=','.*remove the ',' from the file if it separates"),
    (["1.234,5", "7"], {}, r"'x' has numbers with thousands sep.*'1.234,5'.*'x': 'string'"),
    (["1.234,5", "7,5"], OPTIONS, r"'x' has numbers with thousands separators.*'1.234,5'"),
    (["1 234,5", "7,5"], OPTIONS, r"'x' has numbers with thousands separators.*'1 234,5'"),
    (["1,234.5", "7.5"], {}, r"'x' has numbers with thousands separators.*'1,234.5'"),
    (["1,5", "7.5"], {}, r"'x' has numbers with .* both points and commas, such as '1,5'"),
    (["1.5", "7"], OPTIONS, r"'x' has the value '1.5'.*Leave decimal_point=',' out if"),
    (["1,5"], {"types": {"x": "float64"}}, r"'x'.*invalid value '1,5'. Set decimal_point=','"),
    (["1"], {"decimal_point": ";"}, r"decimal_point is ';', expected '.' or ','. Set ','"),
]


@pytest.mark.parametrize(("values", "options", "message"), TOLD)
def test_numbers_that_would_be_texts_are_told(
    tmp_path: Path, values: list[str], options: Any, message: str
) -> None:
    path = write(tmp_path / "a.csv", [[value, "z"] for value in values])
    given = {"delimiter": ";", **options}
    for read in (load, lambda path, **given: prepare(path, tmp_path / "out", **given)):
        with pytest.raises(ValueError, match=message) as told:
            read(path, **given)
        assert str(path) in str(told.value) or "decimal_point is" in message
    if "types" not in options and "decimal_point is" not in message:  # texts by choice, or unread
        source = load(path, types={"x": "string"}, **given)
        assert [text or "" for text in source.table.column("x").to_pylist()] == values
        assert load(path, columns=["y"], **given).fields == ("y",)


@pytest.mark.parametrize("values", [["1,5", "2;"], ["1,2,3"], ["12,"], ["1,5", "low"], ["1;5"]])
def test_other_texts_are_texts(tmp_path: Path, values: list[str]) -> None:
    path = write(tmp_path / "a.csv", [[f'"{value}"', "1"] for value in values])
    assert load(path, delimiter=";").table.column("x").to_pylist() == values
    assert prepare(path, tmp_path / "out", delimiter=";").source.column("x").tolist() == values


def test_texts_of_later_blocks_are_texts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 1 << 10)
    values = ["7"] * 300 + ["1,5", "low"] * 150
    path = write(tmp_path / "a.csv", [[value, "1"] for value in values])
    for read in (load, lambda path, **given: prepare(path, tmp_path / "out", **given).source):
        assert list(read(path, delimiter=";").column("x")) == values


@pytest.mark.parametrize("first", ["", "7", "1,5"])
def test_later_blocks_of_a_file(tmp_path: Path, first: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 1 << 10)
    path = write(tmp_path / "a.csv", [[first, "1"]] * 300 + [["2,25", "1"]] * 300)
    for read in (load, lambda path, **given: prepare(path, tmp_path / "out", **given)):
        with pytest.raises(ValueError, match="Set decimal_point=','"):
            read(path, delimiter=";")
    expected = load(path, **OPTIONS)
    assert expected.column("x")[-1] == 2.25
    assert_equal(prepare(path, tmp_path / "out", **OPTIONS).source, expected)


def test_commands_and_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.random.default_rng(0).normal(size=(30, 2)).round(3)
    texts = [[str(value).replace(".", ",") for value in row] for row in numbers]
    path = write(tmp_path / "a.csv", texts)
    for large in (survey._LARGE, 0):
        monkeypatch.setattr(survey, "_LARGE", large)
        assert main(["data", str(path), "--delimiter=;"]) != 0
        assert "Set --decimal_point=, for numbers" in capsys.readouterr().err
        assert main(["data", str(path), *FLAGS, "--client=user"]) == 0
        assert f"{numbers[:, 0].min()} to {numbers[:, 0].max()}" in capsys.readouterr().out
    assert main(["prepare", str(path), *FLAGS, f"--out={tmp_path / 'out'}"]) == 0
    np.testing.assert_array_equal(load(tmp_path / "out").column("y"), numbers[:, 1])

    files = (
        "--data.files",
        str(path),
        "--data.client=user",
        "--data.label=y",
        "--data.delimiter=;",
    )
    experiment: Any = configure("fedavg_table", [*files, "--data.decimal_point=,"])
    assert "data.decimal_point" in experiment.own_fields
    order = np.argsort(np.arange(30) % 3, kind="stable")
    np.testing.assert_array_equal(np.asarray(experiment.opened.columns["x"]), numbers[order, 0])
    run = ("--training.rounds=1", f"--job_log_dir={tmp_path / 'run'}")
    assert main(["train", "--exp=fedavg_table", *files, "--data.decimal_point=,", *run]) == 0
    capsys.readouterr()
    assert main(["train", "--exp=fedavg_table", *files, f"--job_log_dir={tmp_path / 'no'}"]) != 0
    assert "Set --data.decimal_point=," in capsys.readouterr().err
