"""Tables in memory give the source of the same table in a file."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedpax.data import load, prepare


class Frame:
    """A data frame of another library, known by Arrow's stream alone."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


class Dataset:
    """A data set of Hugging Face, whose rows are chosen by indices beside its table."""

    features: Any = None

    def __init__(self, table: pa.Table, indices: Any) -> None:
        self._table, self._indices = table, indices

    def with_format(self, kind: str) -> "Dataset":
        assert kind == "arrow"
        return self

    def __getitem__(self, rows: slice) -> pa.Table:
        return self._table.take(self._indices)[rows]


def test_tables_of_all_kinds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    owner, x = rng.choice(["bö", "a"], 30), rng.normal(size=(30, 2, 3))
    table = pa.table({"user": owner, "x": pa.FixedShapeTensorArray.from_numpy_ndarray(x)})
    parquet.write_table(table, tmp_path / "a.parquet")
    expected = load(tmp_path / "a.parquet", client="user")
    views = table.set_column(0, "user", table["user"].cast(pa.string_view()))
    order = pa.array(rng.permutation(30))
    shuffled = table.take(pa.array(np.argsort(order)))
    for data in (
        table,
        Frame(table),
        Frame(views),
        Dataset(shuffled, order),
        {"user": owner, "x": x},
    ):
        source = load(data, client="user")
        assert source.client_names == expected.client_names
        np.testing.assert_array_equal(source.client_starts, expected.client_starts)
        np.testing.assert_array_equal(source.column("x"), expected.column("x"))
        assert source.column("user").tolist() == expected.column("user").tolist()
    train, held = (
        load(table, split, client="user", heldout_fraction=0.4) for split in ("train", "heldout")
    )
    assert len(train) + len(held) == 30 and 0 < len(held) < 25


def test_a_dict_of_data_sets_has_splits() -> None:
    """Splits of equal length became two columns with the examples of both."""
    x, y = (Dataset(pa.table({"x": [k, 9, k]}), pa.array([2, 1, 0])) for k in range(2))
    splits = {"train": x, "test": y}
    assert load(splits, "test").column("x").tolist() == [1, 9, 1]
    for split in (None, "dev"):
        with pytest.raises(ValueError, match=r"splits train, test, but split is .* split='train'"):
            load(splits, split)


def test_missing_values_and_what_is_refused() -> None:
    masked = np.ma.MaskedArray([1, 2, 3], mask=[0, 1, 0])
    source = load({"x": masked, "y": ["a", None, "b"]}, columns=["x"])
    assert source.fields == ("x",) and source[1] == {"x": None}
    with pytest.raises(ValueError, match=r"columns has 'z', expected names among 'x'"):
        load({"x": [1]}, columns=["z"])
    with pytest.raises(ValueError, match="several columns named 'x', expected different"):
        load(pa.table([[1], [2]], ["x", "x"]))
    with pytest.raises(ValueError, match="no examples"):
        load({"x": []})
    for values in ({"x": [1]}, "abc", 7, iter([1])):
        with pytest.raises(ValueError, match=r"column 'ann', .* it is not one value for each"):
            load({"ann": values})
    with pytest.raises(ValueError, match=r"client='u' is not a column of the table"):
        load({"x": [1]}, client="u")


@pytest.mark.parametrize(
    "dtype", [">i4", ">f8", "bool", "bfloat16", "int4", "U3", "datetime64[D]", "float16"]
)
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 3)])
def test_arrays_of_every_dtype_keep_their_values(tmp_path: Path, dtype: str, shape: Any) -> None:
    values = np.random.default_rng(3).integers(0, 7, shape)
    x = values.astype(jnp.dtype(dtype) if dtype in ("bfloat16", "int4") else dtype)
    loaded = load({"x": x}).column("x")
    assert loaded.shape == shape and loaded.tolist() == x.tolist()
    if x.dtype.kind != "V":  # which .npz does not keep
        np.savez(tmp_path / "a.npz", x=x)
        assert load(tmp_path / "a.npz").column("x").tolist() == x.tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones(3) * 1j, "dtype complex128, expected numbers.*x.real and x.imag"),
        (np.ones(3, np.longdouble), r"dtype float.*Convert it with .astype\(np.float64\)"),
        (np.ones(3, [("a", int)]), r"dtype \[\('a', '<i8'\)\].*a column for each of its fields"),
        (np.array([1, "a", 2], object), "dtype object.*a value of one type"),
        (np.ones((3, 0)), r"shape \[3, 0\], expected at least one number"),
        (np.ma.MaskedArray(np.ones((3, 2)), [[0, 1]] * 3), "masked values.*Fill them"),
        (np.float32(3), "of type float32.*Pass an array"),
    ],
)
def test_arrays_that_no_column_holds_are_told(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"The column 'x', .*{message}"):
        load({"x": values})
    if isinstance(values, np.ndarray) and values.dtype != object and values.ndim == 1:
        np.savez(tmp_path / "a.npz", x=values)
        with pytest.raises(ValueError, match=f"a.npz cannot be read as npz: 'x': .*{message}"):
            load(tmp_path / "a.npz")


def test_the_index_of_a_filtered_data_frame_is_no_column() -> None:
    frame = Frame(pa.table({"x": [1.5, 2.5], "__index_level_0__": [3, 7]}))
    assert load(frame).fields == ("x",)
    assert load(frame, columns=["__index_level_0__"]).fields == ("__index_level_0__",)


def test_the_index_of_a_filtered_data_frame_in_parquet_is_no_column(tmp_path: Path) -> None:
    path = tmp_path / "frame.parquet"
    parquet.write_table(pa.table({"x": [1.5, 2.5], "__index_level_0__": [3, 7]}), path)
    assert load(path).fields == ("x",)
    assert load(path, columns=["__index_level_0__"]).column("__index_level_0__").tolist() == [3, 7]
    prepare(path, tmp_path / "prepared")
    assert load(tmp_path / "prepared").fields == ("x",)
