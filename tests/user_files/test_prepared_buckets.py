"""Tests of preparing files in buckets."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from user_files.written_tables import assert_equal, write_csv

from fedpax.data import load, prepare


def test_files_in_a_bucket_are_prepared(tmp_path: Path) -> None:
    import fsspec

    rng = np.random.default_rng(6)
    system = fsspec.filesystem("memory")
    for name in ("a", "b"):
        table = pa.table({"user": rng.integers(0, 9, 60), "x": rng.normal(size=60)})
        for suffix, write in ((".parquet", parquet.write_table), (".csv", write_csv)):
            write(table, tmp_path / f"{name}{suffix}")
            content = (tmp_path / f"{name}{suffix}").read_bytes()
            system.pipe(f"/prepared/{name}{suffix}", content)
    for suffix in (".parquet", ".csv"):
        made = prepare(f"memory://prepared/*{suffix}", tmp_path / suffix[1:], client="user").source
        assert_equal(made, load(tmp_path / f"*{suffix}", client="user"))
    with pytest.raises(ValueError, match="is in a bucket, expected a local folder"):
        prepare("memory://prepared/*.csv", "memory://prepared/out", client="user")


def test_a_bucket_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    class UnreachableError(Exception):
        """An error of a bucket's package, whose type is its own."""

    def fail(self: Any, path: str, **options: Any) -> Any:
        raise UnreachableError("could not connect")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "glob", fail)
    with pytest.raises(OSError, match=r"memory://away/\*.csv cannot be read: could not connect"):
        load("memory://away/*.csv")
