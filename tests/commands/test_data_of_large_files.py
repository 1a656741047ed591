"""Tests of `fedpax data` on files that are read in parts."""

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import csv, parquet
from small_runs import Command

from fedpax.data.tables import survey


def _table(rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=rows).round(2)
    numbers[rng.random(rows) < 0.1] = np.nan
    words = np.array(["a", "b", "", "ü"])[rng.integers(0, 4, rows)]
    no_label = rng.random(rows) < 0.1
    return pa.table(
        {
            "user_id": rng.integers(0, 70, rows),
            "label": pa.array(rng.integers(-2, 11, rows), mask=no_label),
            "Label": words,
            "text": pa.array([None, "missing", "10", "9"]).take(pa.array(rng.integers(0, 4, rows))),
            "time": pa.array(rng.integers(0, 4, rows).astype(np.int32)).cast(pa.time32("s")),
            "x": numbers,
            "zero": rng.choice([-1.0, -0.0, 0.0, 1.0], rows),
            "empty": pa.nulls(rows, pa.float64()),
            "when": pa.array(rng.integers(0, 2**30, rows)).cast(pa.timestamp("s")),
            "took": pa.array(rng.integers(-9, 2**20, rows)).cast(pa.duration("s")),
            "flag": rng.random(rows) < 0.5,
            "list": pa.array([[1, 2]] * rows),
            "rare": pa.array([f"note {n}" for n in range(30)] + [None] * (rows - 30)),
        }
    )


@pytest.mark.each_value
@pytest.mark.parametrize(
    "flags",
    [
        ["--client=user_id", "--label=label"],
        ["--client=user_id", "--label=Label"],
        ["--client=user_id", "--label=x"],
        ["--client=user_id", "--label=text"],
        ["--client=user_id", "--label=time"],
        ["--client=Label", "--label=flag"],
        ["--client=user_id", "--label=user_id"],
        ["--client=user_id", "--columns=x,flag"],
        ["--label=label"],
        ["--partition=dirichlet:0.5:7", "--label=label"],
        ["--partition=dirichlet:0.5:7", "--label=x"],
        ["--partition=shards:2:30", "--label=Label", "--columns=x"],
        ["--partition=quantity:0.5:7", "--label=text"],
        ["--partition=iid:5"],
    ],
)
@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_parts_give_the_same_tables(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], format: str
) -> None:
    table = _table(3000)
    if "--client=Label" in flags:
        table = table.filter(pa.compute.not_equal(table["Label"], ""))
    if format == "parquet":
        parquet.write_table(table, tmp_path / "all.parquet", row_group_size=200)
    else:
        csv.write_csv(table.drop_columns(["list", "took"]), tmp_path / "all.csv")
    arguments = ["data", f"{tmp_path}/all.{format}", *flags]
    expected = command(*arguments)
    assert expected[0] == 0
    monkeypatch.setattr(survey, "_LARGE", 0)
    monkeypatch.setattr(survey, "_SHARE", 1)
    monkeypatch.setattr("fedpax.commands.data.load", None)  # it would read the file at once
    assert command(*arguments) == expected


def test_equal_examples_are_counted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    table = _table(4000).append_column("row", pa.array(np.arange(4000)))
    copies = table.take(pa.array(rng.choice(4000, 900)))
    parquet.write_table(pa.concat_tables([table, copies]), tmp_path / "a.parquet")
    arguments = ("data", f"{tmp_path}/a.parquet", "--client=user_id")
    told = " of 4,900 examples equal an earlier one in all columns. If they are "
    assert f"\n900{told}copies, leave them out: SELECT DISTINCT *" in command(*arguments)[1]
    # without the clients of a partition, which are no column of the file
    assert f"\n900{told}" in command(*arguments[:2], "--partition=iid:3000")[1]
    other = ("data", f"{tmp_path}/a.parquet", "--client=row", "--columns=row,flag")
    assert f"\n900{told}" in command(*other)[1]
    monkeypatch.setattr(survey, "_LARGE", 0)
    about = re.search(rf"\nAbout (\d+){told}", command(*arguments)[1])
    assert about and abs(int(about[1]) - 900) < 300  # 8 times one eighth of them, drawn by hash
    parquet.write_table(table, tmp_path / "a.parquet")
    assert "equal an earlier" not in command(*arguments)[1]


def test_lists_that_lack_a_number_are_hashed() -> None:
    lists = pa.array([[1.0, None], [1.0, None], None, [1.0, 2.0]], pa.list_(pa.float32(), 2))
    table = pa.table({"list": lists, "x": [np.nan, None, 0.0, 1.0], "user": ["a", "b", "b", "b"]})
    keys, owners = survey.hash_examples(table, "user")
    assert len(np.unique(keys)) == 3 and len(np.unique(owners)) == 2


def test_each_of_several_files_is_a_client(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(3):
        csv.write_csv(_table(50 + k, k).drop_columns(["list", "took"]), tmp_path / f"{k}.csv")
    arguments = ("data", f"{tmp_path}/*.csv", "--label=label")
    expected = command(*arguments)
    assert expected[0] == 0 and "of 3 clients" in expected[1]
    monkeypatch.setattr(survey, "_LARGE", 0)
    monkeypatch.setattr("fedpax.commands.data.load", None)
    assert command(*arguments) == expected


def test_a_partition_joins_the_examples_of_files(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(3):
        csv.write_csv(_table(50 + k, k).drop_columns(["list", "took"]), tmp_path / f"{k}.csv")
    arguments = ("data", f"{tmp_path}/*.csv", "--label=label", "--partition=dirichlet:0.5:9")
    wrong = [(*arguments[:3], f"--partition={p}") for p in ("half:2", "iid", "iid:0")]
    wrong += [(*arguments, "--client=user_id"), (*arguments[:2], arguments[3])]
    expected = [command(*given) for given in (arguments, *wrong)]
    assert expected[0][0] == 0 and "153 examples of 9 clients" in expected[0][1]
    monkeypatch.setattr(survey, "_LARGE", 0)
    monkeypatch.setattr("fedpax.commands.data.load", None)
    assert [command(*given) for given in (arguments, *wrong)] == expected


def test_a_partition_of_a_prepared_folder_sorts_no_copy(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet.write_table(_table(3000), tmp_path / "all.parquet")
    out = str(tmp_path / "out")
    assert command("prepare", f"{tmp_path}/all.parquet", "--label=label", "--out=" + out)[0] == 0
    for flags in (["--partition=dirichlet:0.5:7"], ["--partition=iid:5", "--label=Label"]):
        with monkeypatch.context() as patch:
            patch.setattr("fedpax.commands.data._is_large", lambda *_: False)
            expected = command("data", out, *flags)
        assert expected[0] == 0 and "names the clients" in expected[1]
        with monkeypatch.context() as patch:
            patch.setattr("fedpax.user_files.open_files.sort_by_client", None)
            assert command("data", out, *flags) == expected


def test_lists_name_no_client(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet.write_table(_table(50), tmp_path / "all.parquet")
    monkeypatch.setattr(survey, "_LARGE", 0)
    status, _, errors = command("data", f"{tmp_path}/all.parquet", "--client=list")
    assert status and "expected texts or numbers that name a client" in errors


_PEAK = """
import resource, sys
import pyarrow as pa
from fedpax.commands.data import data
from fedpax.data.tables import survey
survey._LARGE = 0
data([sys.argv[1], "--client=user_id", "--label=label"])
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(pa.default_memory_pool().max_memory() // 2**20, resident)
"""


def _peaks(path: Path, groups: int) -> tuple[int, int]:
    """Return the largest memory of pyarrow and of the process, for a file of row groups, in MiB."""
    rng, n = np.random.default_rng(0), 100_000
    notes = pa.array([f"{k:0100d}" for k in range(1000)])
    kinds = {"user_id": pa.int64(), "label": pa.int64(), "x": pa.float64(), "note": pa.string()}
    with parquet.ParquetWriter(path, pa.schema(kinds)) as writer:
        for _ in range(groups):
            part = {
                "user_id": rng.integers(0, 1000, n),
                "label": rng.integers(0, 10, n),
                "x": rng.integers(0, 1000, n) / 8,
                "note": notes.take(pa.array(rng.integers(0, 1000, n))),
            }
            writer.write_table(pa.table(part))
    run = [sys.executable, "-c", _PEAK, path]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    of_arrow, resident = map(int, done.stdout.split()[-2:])
    return of_arrow, resident


def test_columns_are_never_whole_in_memory(tmp_path: Path) -> None:
    of_arrow, _ = _peaks(tmp_path / "all.parquet", 10)
    assert of_arrow < 64  # MiB; the columns take 130


@pytest.mark.slow
def test_memory_is_flat_in_rows(tmp_path: Path) -> None:
    peaks = np.array([_peaks(tmp_path / f"{groups}.parquet", groups) for groups in (5, 50)])
    assert np.all(peaks[1] < peaks[0] + [16, 150]), peaks  # MiB; 45 groups take 600


@pytest.mark.parametrize(
    "flags", [["--label=Label"], ["--label=label", "--types=user_id=string"], []]
)
def test_a_picture_of_parts_shows_the_same_clients(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    drawn = []

    def draw(statistics: Any, path: Any, **given: Any) -> None:
        drawn.append(
            (statistics, given["class_names"], [str(n) for n in given["participant_names"]])
        )

    monkeypatch.setattr("fedpax.commands.data.plot_statistics", draw)
    monkeypatch.setattr("fedpax.populations.partition_plot.plot_statistics", draw)
    parquet.write_table(_table(3000), tmp_path / "all.parquet", row_group_size=200)
    arguments = ["data", f"{tmp_path}/all.parquet", "--client=user_id", *flags]
    picture = f"--picture={tmp_path}/clients.png"
    assert command(*arguments, picture)[0] == 0
    monkeypatch.setattr(survey, "_LARGE", 0)
    monkeypatch.setattr("fedpax.commands.data.load", None)  # it would read the file at once
    assert command(*arguments, picture)[0] == 0
    (expected, *names), (result, *same_names) = drawn
    assert same_names == names
    for field, value in expected._asdict().items():
        if value is None:
            assert getattr(result, field) is None
        else:
            np.testing.assert_allclose(getattr(result, field), value, rtol=1e-9)
    status, _, errors = command("data", f"{tmp_path}/all.parquet", picture)
    assert status == 2 and "shows clients, but the files have none" in errors


def test_images_in_tables_are_told_alike(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, rows = np.random.default_rng(0), []
    for k in range(30):
        stream = io.BytesIO()
        shape = (4, 6, 4) if k % 3 else (4, 4)
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(stream, "PNG")
        rows.append({"image": stream.getvalue(), "camera": f"camera {k % 2}"})
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    arguments = ["data", f"{tmp_path}/a.parquet", "--client=camera"]
    assert "image: encoded images; --image_size=HEIGHTxWIDTH decodes" in command(*arguments)[1]
    expected = command(*arguments, "--image_size=3x3")
    told = (
        "uint8[3, 3, 3]",
        "20 images with alpha",
        "20 images of another ratio",
        "10 gray images",
    )
    assert all(text in expected[1] for text in told) and "__" not in expected[1]
    monkeypatch.setattr(survey, "_LARGE", 0)
    monkeypatch.setattr("fedpax.commands.data.load", None)
    assert command(*arguments, "--image_size=3x3") == expected
