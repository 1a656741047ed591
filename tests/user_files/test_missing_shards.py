"""Tests of shards such as train-00000-of-00003.csv: they are one data set, and none is missing."""

import logging
from pathlib import Path

import numpy as np
import pytest

from fedpax.data import load, prepare
from fedpax.user_files.finding import is_numbered


def _write(folder: Path, numbers: list[int], total: int) -> Path:
    folder.mkdir()
    values = np.random.default_rng(total).integers(0, 99, total)
    for k in numbers:
        (folder / f"train-{k:05d}-of-{total:05d}.csv").write_text(f"x\n{values[k]}\n")
    return folder


@pytest.mark.parametrize("pattern", ["", "*", "*.csv", "train-*-of-00003.csv", "train-*"])
def test_a_missing_shard_is_told(tmp_path: Path, pattern: str) -> None:
    folder = _write(tmp_path / "d", [0, 2], 3)
    told = r"train-00001-of-00003.csv is missing: 2 of 3 shards .*Fetch it, or .*train-00000\*'"
    for read in (load, lambda path: prepare(path, tmp_path / "out")):
        with pytest.raises(ValueError, match=told):
            read(folder / pattern)
    with pytest.raises(ValueError, match="is missing"):  # not the training shards in its place
        load(folder / pattern, "heldout", heldout_fraction=0.5)


def test_all_shards_are_one_data_set_without_clients(tmp_path: Path) -> None:
    source = load(_write(tmp_path / "d", [0, 1, 2], 3) / "*.csv")
    assert source.client is None and len(source) == 3


def test_chosen_shards_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = _write(tmp_path / "d", [0, 2, 3], 12)
    assert len(load(folder / "train-0000[02]-of-*")) == 2
    assert len(load(folder / "train-0000*")) == 3
    assert len(load(folder / "train-00000-of-00012.csv")) == 1
    with caplog.at_level(logging.WARNING):
        assert len(load(sorted(folder.iterdir()))) == 3
    assert "train-00001-of-00012.csv is missing: 3 of 12 shards are there." in caplog.text


def test_shards_are_known_by_their_names() -> None:
    assert is_numbered("train-00000-of-00003") and not is_numbered("north")
