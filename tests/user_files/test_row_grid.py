"""Tests of prepared images whose batches are on one grid of rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fedpax.sources.reused_memory import ALIGNMENT
from fedpax.user_files import prepared
from fedpax.user_files.arrow_numpy import array_to_arrow, to_numpy
from fedpax.user_files.prepared import RowGrid, open_prepared, write_prepared
from fedpax.user_files.table_source import TableSource


def prepare_images(folder: Path, shape: tuple[int, ...], dtype: Any) -> tuple[pa.Table, Any]:
    """Write images between other columns, of clients with names of any length."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 200, (300, *shape)).astype(dtype)
    columns = {
        "user": np.sort(["é" * n for n in rng.integers(1, 60, 300)]),
        "holes": pa.array(rng.normal(size=300), mask=rng.random(300) < 0.1),
        "image": array_to_arrow(images),
        "label": rng.integers(0, 9, 300),
        "small": array_to_arrow(rng.integers(0, 9, (300, 2)).astype(np.uint8)),
    }
    table = pa.table(columns)
    parts = [table.slice(begin, 25) for begin in range(0, 300, 25)]
    folder.mkdir()
    write_prepared(folder, parts, table.schema, {"client": "user", "files": "a"})
    return table, images


def batch_starts(source: TableSource, name: str) -> Any:
    """Return where the rows of each batch are in memory."""
    chunks = source.table.column(name).chunks
    return np.array([chunk.storage.flatten().buffers()[1].address for chunk in chunks])


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8"])
@pytest.mark.parametrize("shape", [(28, 28, 1), (3, 3, 3), (7,), (1, 64)])
def test_rows_of_all_batches_are_on_one_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str
) -> None:
    monkeypatch.setattr(prepared, "_BATCH_ROWS", 31)
    table, images = prepare_images(tmp_path / "out", shape, dtype)
    # Without the grid, as in folders of earlier versions.
    monkeypatch.setattr(RowGrid, "metadata", lambda self, batch: None)
    prepare_images(tmp_path / "earlier", shape, dtype)
    sources = [open_prepared(tmp_path / name) for name in ("out", "earlier")]
    starts = batch_starts(sources[0], "image")
    assert len(starts) > 5 and not ((starts - starts[0]) % images[0].nbytes).any()
    chosen = np.random.default_rng(1).integers(0, 300, 400)
    for source in sources:
        assert source.table.equals(table)
        taken = source.take(chosen)
        assert taken["image"].dtype == images.dtype
        np.testing.assert_array_equal(taken["image"], images[chosen])
        np.testing.assert_array_equal(taken["small"], to_numpy(table["small"])[chosen])
        np.testing.assert_array_equal(taken["label"], table["label"].to_numpy()[chosen])


def test_images_on_the_grid_are_read_into_memory_that_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_BATCH_ROWS", 31)
    prepare_images(tmp_path / "out", (28, 28, 1), "u1")
    read = open_prepared(tmp_path / "out").reader()
    addresses = {read(np.arange(k, k + 50))["image"].ctypes.data for k in range(20)}
    assert len(addresses) <= 2 and not any(address % ALIGNMENT for address in addresses)


def test_long_rows_are_not_padded_by_more_than_a_part_of_a_batch() -> None:
    table = pa.table({"image": array_to_arrow(np.zeros((1, 3, 1001, 1001), np.uint8))})
    (batch,) = table.to_batches()
    grid = RowGrid(table.schema, pa.MockOutputStream())
    assert grid.metadata(batch) == {"padding": ""}
    grid._first = 8  # of another batch
    assert grid.metadata(batch) == {"padding": ""}
    assert RowGrid(pa.schema([("x", pa.int64())]), None).metadata(batch) is None
