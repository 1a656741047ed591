"""The embedded data sets are the same with TFDS and without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.data import load
from fedpax.errors import MissingPackageError
from fedpax.sources import data_sets


@pytest.fixture
def without_tfds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import sys

    monkeypatch.setattr(data_sets, "is_installed", lambda module: False)
    for name in [name for name in sys.modules if name.startswith("tensorflow_datasets")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    yield


def as_list(source: Any) -> list[Any]:
    return [
        {name: (type(value), np.asarray(value).tolist()) for name, value in example.items()}
        for example in source
    ]


@pytest.mark.parametrize(
    ("name", "split"),
    [("digits", "train"), ("digits", "test"), ("stdlib_text", "train"), ("stdlib_text", "heldout")],
)
def test_examples_and_their_order_are_those_of_tfds(
    name: str, split: str, data_dir: Path, request: pytest.FixtureRequest
) -> None:
    prepared = load(name, split, data_dir=data_dir)
    expected, columns = (
        as_list(prepared),
        list(prepared.column("label" if name == "digits" else "client")),
    )
    request.getfixturevalue("without_tfds")
    source = load(name, split)
    assert source.name == prepared.name and len(source) == len(prepared)
    assert as_list(source) == expected
    assert list(source.column("label" if name == "digits" else "client")) == columns


@pytest.mark.parametrize(("name", "split"), [("digits", "train"), ("stdlib_text", "heldout")])
def test_a_whole_split_is_made_without_tfds(
    name: str, split: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(data_sets, "_builder", None)
    assert len(load(name, split)) > 10
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_without_tfds(without_tfds: None, tmp_path: Path) -> None:
    assert len(load("digits", "train", data_dir=tmp_path)) > 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "split"),
    [("mnist", "train"), ("digits", "train[:10%]"), ("federated_emnist", "train")],
)
def test_other_data_need_the_extra(without_tfds: None, name: str, split: str) -> None:
    with pytest.raises(MissingPackageError, match=rf"'{name}' needs .* 'fedpax\[tfds\]'"):
        load(name, split)
