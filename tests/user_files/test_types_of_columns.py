"""Every type of a column is read, prepared and shown, or told with the column and a remedy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from user_files.written_tables import assert_equal, write_arrow

from fedpax.data import load, prepare
from fedpax.data.tables import infer_label
from fedpax.main import main
from fedpax.user_files import arrow_numpy
from fedpax.user_files.arrow_numpy import array_to_arrow, numpy_dtype

SIZE = 40
NUMBERS = np.random.default_rng(0).integers(-(2**50), 2**50, SIZE)
HOLES = np.random.default_rng(1).random(SIZE) < 0.3
NANOSECONDS = 1_600_000_000_000_000_001 + np.arange(SIZE) % 5


def as_interval(number: int) -> Any:
    return pa.MonthDayNano([number % 12, number % 28, number % 1000])


TYPES = {
    "half": pa.array((NUMBERS % 1000).astype(np.float16), mask=HOLES),
    "view": pa.array([f"é{n}" for n in NUMBERS], pa.string_view(), mask=HOLES),
    "bytes view": pa.array([b"\xff%d" % n for n in NUMBERS], pa.binary_view()),
    "decimal": pa.array(NUMBERS.tolist(), mask=HOLES).cast(pa.decimal256(40, 3)),
    "interval": pa.array(
        [None if h else as_interval(int(n)) for n, h in zip(NUMBERS, HOLES, strict=True)]
    ),
    "time": pa.array(np.abs(NUMBERS) % 10**13, pa.time64("ns"), mask=HOLES),
    "map": pa.array([[("a", int(n))] for n in NUMBERS], pa.map_(pa.string(), pa.int64())),
}
CLIENTS = {
    "time": pa.array(NANOSECONDS, pa.timestamp("ns")),
    "time zone": pa.array(NANOSECONDS, pa.timestamp("ns", "Europe/Oslo")),
    "duration": pa.array(np.arange(SIZE) % 5, pa.duration("ns")),
    "time of day": pa.array(np.arange(SIZE) % 5, pa.time64("ns")),
    "bytes": pa.array([b"\xff%d" % (k % 3) for k in range(SIZE)]),
    "view": pa.array(["ä", "b"] * (SIZE // 2), pa.string_view()),
}


@pytest.mark.parametrize("name", TYPES)
def test_columns_are_read_prepared_and_shown(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"user": [f"u{k % 3}" for k in range(SIZE)], "x": TYPES[name]})
    path = write_arrow(table, tmp_path / "a.arrow")
    source = load(path, client="user")
    assert_equal(prepare(path, tmp_path / "out", client="user").source, source)
    order = np.argsort(np.arange(SIZE) % 3, kind="stable")
    values = table["x"].cast(source.table["x"].type).take(order)
    assert source.table["x"].combine_chunks().equals(values.combine_chunks())
    if name != "bytes view":
        assert main(["data", str(path), "--client=user"]) == 0
        assert "3 clients" in capsys.readouterr().out


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_have_names(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"user": CLIENTS[name], "x": np.arange(SIZE)})
    path = write_arrow(table, tmp_path / "a.arrow")
    source = load(path, client="user")
    assert_equal(prepare(path, tmp_path / "out", client="user").source, source)
    assert len({*source.client_names}) == len(source.client_names) > 1
    assert str(source.client_names[0]) in repr(source.client_names)
    assert main(["data", str(path), "--client=user"]) == 0
    assert "clients" in capsys.readouterr().out


def test_nanoseconds_of_clients_are_in_their_names() -> None:
    source = load(pa.table({"user": CLIENTS["time"]}), client="user")
    assert source.client_names[:2] == [
        "2020-09-13 12:26:40.000000001",
        "2020-09-13 12:26:40.000000002",
    ]
    times = load(pa.table({"x": TYPES["time"]})).column("x")
    assert times.dtype == "m8[ns]"
    expected = np.abs(NUMBERS) % 10**13
    np.testing.assert_array_equal(times.data[~HOLES].astype(np.int64), expected[~HOLES])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.arange(4).astype(np.float16), "halffloat"),
        ([[1], [2], [1], [2]], "list<"),
        (pa.array([1, 2, 3, 4]).cast(pa.decimal256(40, 1)), "decimal256"),
    ],
)
def test_clients_that_cannot_be_sorted_are_told(tmp_path: Path, values: Any, words: str) -> None:
    path = write_arrow(pa.table({"user": values, "x": [1, 2, 3, 4]}), tmp_path / "a.arrow")
    message = rf"column 'user' of .* has values of type {words}.*types=\{{'user': 'string'\}}"
    with pytest.raises(ValueError, match=message):
        load(path, client="user")
    with pytest.raises(ValueError, match=message):
        prepare(path, tmp_path / "out", client="user")


def test_labels_that_are_no_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day = pa.array([1, 2], pa.timestamp("ns"))
    with pytest.raises(
        ValueError, match=r"label 'y' has values of type timestamp.*expected numbers"
    ):
        infer_label("y", day)
    table = pa.table({"user": ["a", "b"], "y": [[1, 2], [3, 4]]})
    path = write_arrow(table, tmp_path / "a.arrow")
    assert main(["data", str(path), "--client=user", "--label=y"]) == 0
    assert "2 clients" in capsys.readouterr().out


LARGE = {"9007199254740993": "0.5", "12345678901234567890": "3", "-9007199254740995": "1.5"}


@pytest.mark.parametrize("integer", LARGE)
@pytest.mark.parametrize("format_", ["csv", "tsv", "jsonl", "json"])
def test_an_integer_that_a_float_does_not_hold_raises(tmp_path, integer, format_):
    rows = [("A", integer), ("B", LARGE[integer])]
    separator = "\t" if format_ == "tsv" else ","
    texts = [f"hospital{separator}id", *(separator.join(row) for row in rows)]
    if format_.startswith("json"):
        texts = [f'{{"hospital": "{client}", "id": {value}}}' for client, value in rows]
    path = tmp_path / f"a.{format_}"
    path.write_text("\n".join(texts) + "\n")
    remedy = "Write the values of 'id' as texts" if "json" in format_ else r"types=.'id': 'string'"
    words = f"a.{format_} .*'id' has the integer {integer} .*{remedy}.*columns="
    with pytest.raises(ValueError, match=words):
        load(path)
    with pytest.raises(ValueError, match=words):
        prepare(path, tmp_path / "prepared", client="hospital")
    assert load(path, columns=["hospital"]).column("hospital").tolist() == ["A", "B"]
    if "json" not in format_:
        assert load(path, types={"id": "string"}).column("id").tolist() == [integer, LARGE[integer]]


def test_large_floats_that_are_exact_integers_are_read(tmp_path):
    values = ["100000000000000000000", "9007199254740992", "1e300", "0.5"]
    (tmp_path / "a.csv").write_text("x\n" + "\n".join(values) + "\n")
    assert load(tmp_path / "a.csv").column("x").tolist() == [float(value) for value in values]
    lists = tmp_path / "a.jsonl"
    lists.write_text('{"x": [0.5, 9007199254740993]}\n')
    with pytest.raises(ValueError, match="'x' has the integer 9007199254740993"):
        load(lists)


def test_an_integer_in_a_later_block_raises(tmp_path, monkeypatch):
    from fedpax.user_files.readers import csv_files

    monkeypatch.setattr(csv_files, "_BLOCK", 64)
    lines = ["hospital,id", *["A,0.5"] * 30, "B,9007199254740993", *["A,7"] * 30]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="'id' has the integer 9007199254740993"):
        prepare(path, tmp_path / "prepared", client="hospital")


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int8, np.uint16, np.int64])
def test_numbers_of_arrow_have_numpy_dtypes_without_pandas(kind) -> None:
    assert numpy_dtype(pa.from_numpy_dtype(kind)) == kind
    files = Path(arrow_numpy.__file__).parent.rglob("*.py")
    calls = [p.name for p in files if ".to_pandas_dtype()" in p.read_text(encoding="utf-8")]
    assert not calls  # PyArrow 25 imports pandas for it


def test_times_with_and_without_a_zone_are_told_with_a_type_of_times(tmp_path: Path) -> None:
    for name, kind in (("a", pa.timestamp("ms", "UTC")), ("b", pa.timestamp("us"))):
        table = pa.table({"user": [name], "time": pa.array([1000], kind)})
        write_arrow(table, tmp_path / f"{name}.arrow")
    with pytest.raises(
        ValueError, match=r"Set types=\{'time': 'timestamp\[us\]'\} if all are in UTC"
    ):
        load(f"{tmp_path}/*.arrow", client="user")
    source = load(f"{tmp_path}/*.arrow", client="user", types={"time": "timestamp[us]"})
    assert source.column("time").astype("M8[us]").astype(int).tolist() == [1_000_000, 1000]


def test_a_skipped_example_is_told_in_words(tmp_path: Path) -> None:
    table = pa.table(
        {
            "time": pa.array([0, 1], pa.timestamp("us", "UTC")),
            "user": ["a", None],
            "x": ["y" * 99] * 2,
        }
    )
    write_arrow(table, tmp_path / "a.arrow")
    made = prepare(tmp_path / "a.arrow", tmp_path / "out", client="user", on_bad_row="skip")
    (first,) = made.first_skipped.values()
    assert first.startswith("time: 1970-01-01 00:00:00.000001+00:00, user: None, x: yyy")
    assert first.endswith("y...") and len(first) == 83


def test_dates_of_one_type_are_held_out_alike_in_each_format(tmp_path: Path) -> None:
    start = np.datetime64("2025-10-29T00:30:00")
    times = [str(start + np.timedelta64(k, "h")).replace("T", " ") for k in range(200)]
    lines = [f"{time},{k}" for k, time in enumerate(times)]
    (tmp_path / "dates.csv").write_text("\n".join(["time,x", *lines]) + "\n")
    columns = {"text": pa.array(times)}
    columns |= {unit: columns["text"].cast(pa.timestamp(unit)) for unit in ("us", "ns")}
    for name, column in columns.items():
        pq.write_table(pa.table({"time": column, "x": range(200)}), tmp_path / f"{name}.parquet")

    def held_out(pattern: str, types: Mapping[str, str]) -> dict[str, set[int]]:
        return {
            path.stem: set(
                load(str(path), "heldout", heldout_fraction=0.2, types=types).column("x").tolist()
            )
            for path in tmp_path.glob(pattern)
        }

    # As docs/tables.md states: by their types, unless one type is stated.
    apart = held_out("*", {})
    assert len(apart) == 4 and len({frozenset(rows) for rows in apart.values()}) == 4
    alike = [*held_out("*", {"time": "timestamp[s]"}).values()]
    assert len(alike) == 4 and alike[0] and all(rows == alike[0] for rows in alike)
    texts = held_out("[dt]*", {"time": "string"})
    assert texts["dates"] == texts["text"] == apart["text"]


@pytest.mark.parametrize(
    ("one", "two", "joined"),
    [
        ("float16", "int16", "float32"),
        ("float32", "float64", "float64"),
        ("uint8", "int8", "int16"),
    ],
)
def test_arrays_of_several_types_have_the_wider_one(
    tmp_path: Path, one: str, two: str, joined: str
) -> None:
    rows = [np.arange(12).reshape(2, 3, 2).astype(dtype) for dtype in (one, two)]
    for name, row in zip("ab", rows, strict=True):
        np.savez(tmp_path / f"{name}.npz", x=row)
    for source in (
        load(tmp_path / "*.npz"),
        prepare(tmp_path / "*.npz", tmp_path / "prepared").source,
    ):
        x = source.column("x")
        assert x.dtype == joined
        np.testing.assert_array_equal(x, np.concatenate(rows))
    for path in ("*.npz", "a.npz"):
        assert load(tmp_path / path, types={"x": "float64"}).column("x").dtype == "float64"
    np.savez(tmp_path / "c.npz", x=rows[0][:, :2])  # of another shape
    with pytest.raises(ValueError, match="save one shape"):
        load(tmp_path / "*.npz")


def test_a_type_for_all_keeps_the_held_out_part_of_arrays(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for first, dtype in enumerate(("float32", "float64")):
        values = {"x": random.normal(size=(50, 2)).astype(dtype), "n": 50 * first + np.arange(50)}
        np.savez(tmp_path / f"{dtype}.npz", client=np.repeat(first, 50), **values)

    def held_out(files: str, types: Mapping[str, str] | None) -> set[int]:
        options: dict[str, Any] = {"heldout_fraction": 0.3, "client": "client", "types": types}
        rows = load(tmp_path / files, "heldout", **options).column("n")
        return {int(n) for n in rows if n < 50}

    types = {"x": "float64"}
    assert held_out("*.npz", types) == held_out("float32.npz", types) != set()
    assert held_out("*.npz", None) != held_out("float32.npz", None)


def test_integers_of_arrays_that_a_float_does_not_hold(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.float64([[0.5, 1.5]]))
    np.savez(tmp_path / "b.npz", x=np.int64([[2**53 + 1, 1]]))
    with pytest.raises(ValueError, match="9007199254740993"):
        load(tmp_path / "*.npz").column("x")


def test_a_file_can_have_no_array_of_a_column(tmp_path: Path) -> None:
    arrays = array_to_arrow(np.ones((3, 2), np.float32))
    pq.write_table(pa.table({"x": arrays}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.nulls(2)}), tmp_path / "b.parquet")
    x = load(tmp_path / "*.parquet").column("x")
    assert x.shape == (5, 2) and x.mask.all(1).tolist() == [False] * 3 + [True] * 2


def test_pixels_of_bytes_are_not_joined_with_pixels_of_floats(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 8, 8, 3), np.uint8))
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 8, 8, 3), np.float32))
    with pytest.raises(ValueError, match="expected one type"):
        load(tmp_path / "*.npz")
