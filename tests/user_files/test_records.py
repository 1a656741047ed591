"""Tests of the records of prepared folders: the scalars of an example side by side."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from user_files.test_sharding import prepare_shards
from user_files.written_tables import write_arrow

from fedpax.data import load, prepare
from fedpax.user_files import prepared


def test_numbers_of_small_clients_are_read_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    table = pa.table(
        {
            "user": rng.integers(0, 200, 5000),
            "": rng.integers(0, 99, 5000).astype(np.int8),
            "é": rng.normal(size=5000).astype(np.float32),
            "x": rng.normal(size=5000),
            "holes": pa.array(rng.normal(size=5000), mask=rng.random(5000) < 0.5),
        }
    )
    path = write_arrow(table, tmp_path / "a.arrow")
    source = prepare(path, tmp_path / "out", client="user", columns=["", "é", "x", "holes"]).source
    small = source.select(["é", "holes"])
    rows = rng.integers(0, 5000, 900)
    expected = load(path, client="user").take(rows)
    expected = {name: expected[name] for name in source.fields}
    monkeypatch.setattr("fedpax.user_files.row_gatherers.ColumnGatherer.gather", None)
    for opened in (source, small, load(tmp_path / "out")):
        for name in opened.fields:
            values = opened.take(rows)[name]
            assert values.dtype == expected[name].dtype and values.flags.c_contiguous
            np.testing.assert_array_equal(values, expected[name])
    file = tmp_path / "out" / "records.bin"
    assert file.stat().st_size == 5000 * 32  # of 3 * 8 + 4 + 1 bytes, and 1 for what is missing
    content = file.read_bytes()
    for damaged in (content[:-32], content + b"0" * 32, content[:-1], b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"out is damaged: .*prepare it again"):
            load(tmp_path / "out")


_TYPES = [
    *(pa.int8(), pa.int16(), pa.int64(), pa.uint8(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.bool_()),
    *(pa.date32(), pa.date64(), pa.timestamp("ns", "Asia/Tokyo"), pa.timestamp("s")),
    pa.duration("us"),
]


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return integers up to the bounds of a type, or floats with NaN and infinities, or None."""
    if pa.types.is_floating(kind):
        numbers: Any = st.floats(width=kind.bit_width)
        return st.none() | numbers.map(np.dtype(f"f{kind.bit_width // 8}").type)
    if pa.types.is_boolean(kind):
        return st.none() | st.booleans()
    bits = 24 if kind == pa.date32() else kind.bit_width
    low, high = 0, 2**bits - 1
    if not pa.types.is_unsigned_integer(kind):
        low, high = -(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1
    return st.none() | st.integers(low, high)


@st.composite
def tables(draw: Any) -> pa.Table:
    """Draw tables of scalars, in which any value can be missing."""
    rows = draw(st.integers(1, 40))
    columns = {"user": pa.array(draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))}
    for k, kind in enumerate(draw(st.lists(st.sampled_from(_TYPES), min_size=1, max_size=5))):
        values = draw(st.lists(values_of(kind), min_size=rows, max_size=rows))
        if pa.types.is_temporal(kind) and kind not in (pa.date32(), pa.date64()):
            columns[f"x{k}"] = pa.array(values, pa.int64()).cast(kind)
        elif kind == pa.date64():  # of whole days
            days = [None if v is None else v // 2**40 * 86_400_000 for v in values]
            columns[f"x{k}"] = pa.array(days, pa.int64()).cast(kind)
        else:
            columns[f"x{k}"] = pa.array(values, kind)
    return pa.table(columns)


@settings(max_examples=15, deadline=None)
@given(tables(), st.integers(1, 4), st.integers(1, 50), st.randoms(use_true_random=False))
def test_records_have_the_values_of_columns(
    tmp_path_factory: Any, table: pa.Table, num_shards: int, batch_rows: int, random: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "_BATCH_ROWS", batch_rows)
        write_arrow(table, folder / "a.arrow")
        prepare(folder / "a.arrow", folder / "whole", client="user")
        prepare_shards(folder / "a.arrow", folder / "shards", num_shards, client="user")
    rows = [random.randrange(len(table)) for _ in range(random.randrange(60))]
    for opened in (load(folder / "whole"), load(folder / "shards")):
        by_column = load(opened.folder)
        by_column._records = ()
        for name, expected in by_column.take(rows).items():
            values = opened.take(rows)[name]
            assert type(values) is type(expected) and values.dtype == expected.dtype, name
            assert np.ma.getmaskarray(values).tolist() == np.ma.getmaskarray(expected).tolist()
            # Bit by bit: NaN, -0.0, integers beyond 2**53; and values that the mask hides.
            assert np.ma.getdata(values).tobytes() == np.ma.getdata(expected).tobytes(), name
            missing = opened.table.column(name).is_null().to_numpy()[rows]
            assert np.ma.getmaskarray(values).tolist() == missing.tolist()


def test_a_value_is_of_its_column_type_if_all_of_a_cohort_are_missing(tmp_path: Path) -> None:
    columns = {"u": [0, 1, 1], "n": [2**53 + 1, None, None], "b": [None, None, True]}
    path = write_arrow(pa.table(columns), tmp_path / "a.arrow")
    for source in (load(path), prepare(path, tmp_path / "out", client="u").source):
        taken = source.take([1, 2])
        assert taken["n"].dtype == np.int64 and taken["n"].mask.all()
        assert taken["b"].tolist() == [None, True]
        assert source.take([0])["n"].tolist() == [2**53 + 1]


def test_folders_of_earlier_versions_open(tmp_path: Path) -> None:
    table = {"u": [0, 1, 1], "x": [0.5, 1.5, 2.5], "holes": [None, 1, 2]}
    path = write_arrow(pa.table(table), tmp_path / "a.arrow")
    prepare(path, tmp_path / "out", client="u")
    about = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert about.pop("columns_of_records") == {"u": False, "x": False, "holes": True}
    dtype = np.dtype({"names": ["u", "x"], "formats": ["i8", "f8"], "offsets": [0, 8]})
    records = np.array(list(zip(table["u"], table["x"], strict=True)), dtype)
    for earlier in ({"records": ["u", "x"]}, {}):
        (tmp_path / "out" / "prepared.json").write_text(json.dumps({**about, **earlier}))
        (tmp_path / "out" / "records.bin").write_bytes(records.tobytes())
        taken = load(tmp_path / "out").take([2, 0])
        assert {name: values.tolist() for name, values in taken.items()} == {
            "u": [1, 0], "x": [2.5, 0.5], "holes": [2, None]
        }  # fmt: skip
