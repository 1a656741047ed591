"""Every suffix is read, as written by another library, and is in the table of the page."""

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from PIL import Image
from pyarrow import csv, feather, parquet
from user_files.test_container_files import tfrecord
from user_files.written_tables import lines

from fedpax.data import load
from fedpax.user_files.formats import FORMATS

ROOT = Path(__file__).parent.parent.parent


def rows(x: NDArray[Any]) -> list[dict[str, int]]:
    return [{"x": int(value)} for value in x]


def write_csv(x: NDArray[Any], path: Path) -> None:
    delimiter = "," if path.suffix == ".csv" else "\t"
    columns = pa.table({"x": x, "y": -x})
    csv.write_csv(columns, path, csv.WriteOptions(delimiter=delimiter))


def write_hdf5(x: NDArray[Any], path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = x


def write_tfrecord(x: NDArray[Any], path: Path) -> None:
    from tensorflow_datasets.proto import tf_example_pb2

    records = []
    for value in x:
        example = tf_example_pb2.Example()
        example.features.feature["x"].int64_list.value.append(value)
        records.append(example.SerializeToString())
    path.write_bytes(tfrecord(records))


def write_tar(x: NDArray[Any], path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for k, row in enumerate(rows(x)):
            member = path.with_name(f"{k}.json")
            member.write_text(json.dumps(row))
            archive.add(member, member.name)


# By reader: a function that writes `x`.
WRITERS: dict[str, Callable[[NDArray[Any], Path], Any]] = {
    "csv_files:read_csv": write_csv,
    "arrow_files:read_parquet": lambda x, path: parquet.write_table(pa.table({"x": x}), path),
    "json_files:read_json_lines": lambda x, path: path.write_bytes(lines(rows(x))),
    "json_files:read_json": lambda x, path: path.write_text(json.dumps(rows(x))),
    "arrow_files:read_arrow": lambda x, path: feather.write_feather(pa.table({"x": x}), path),
    "array_files:read_npz": lambda x, path: np.savez(path, x=x),
    "array_files:read_hdf5": write_hdf5,
    "tfrecord_files:read_tfrecord": write_tfrecord,
    "tar_files:read_tar": write_tar,
    "token_files:read_bin": lambda x, path: path.write_bytes(x.astype(np.uint16).tobytes()),
    "token_files:read_npy": lambda x, path: np.save(path, x),
}
IMAGES = [suffix for suffix, form in FORMATS.items() if form.read == "image_files:read_images"]


@pytest.mark.parametrize("suffix", [s for s in FORMATS if s not in IMAGES])
def test_a_file_of_each_suffix_has_what_was_written(tmp_path: Path, suffix: str) -> None:
    x = np.random.default_rng(0).integers(0, 60_000, 9)
    path = tmp_path / f"a{suffix}"
    WRITERS[FORMATS[suffix].read](x, path)
    types = {"tokens": "uint16"} if suffix == ".bin" else None
    column = "tokens" if FORMATS[suffix].read.startswith("token_files") else "x"
    values = [np.ravel(example[column]) for example in load(path, types=types)]
    np.testing.assert_array_equal(np.concatenate(values), x)


# Binary files that begin with numbers, or with the name of a file.
WITHOUT_SIGNATURE = {"tfrecord_files:read_tfrecord", "tar_files:read_tar", "token_files:read_bin"}


@pytest.mark.parametrize("suffix", [s for s in FORMATS if s not in IMAGES])
def test_a_file_with_the_suffix_of_csv_is_told_by_its_signature(
    tmp_path: Path, suffix: str
) -> None:
    form = FORMATS[suffix]
    WRITERS[form.read](np.arange(9), tmp_path / f"a{suffix}")
    content = (tmp_path / f"a{suffix}").read_bytes()
    assert content.startswith(form.signature)
    if form.signature:
        (tmp_path / "b.csv").write_bytes(content)
        with pytest.raises(ValueError, match=f"b.csv is {form.kind or 'a zip archive'}, expected"):
            load(tmp_path / "b.csv")
    else:
        assert content.isascii() or form.read in WITHOUT_SIGNATURE


@pytest.mark.parametrize("suffix", IMAGES)
def test_an_image_of_each_suffix_has_its_pixels(tmp_path: Path, suffix: str) -> None:
    x = np.random.default_rng(0).integers(0, 256, (5, 4), np.uint8)
    path = tmp_path / f"a{suffix}"
    Image.fromarray(x).save(path)
    with Image.open(path) as image:  # JPEG and WebP lose some of `x`
        expected = np.asarray(image.convert("RGB"))
    actual = load(path)[0]["image"]
    np.testing.assert_array_equal(np.broadcast_to(actual, expected.shape), expected)


def test_the_page_names_each_suffix() -> None:
    page = (ROOT / "docs/your_data.md").read_text("utf-8")
    table = page.split("| suffix | read by |")[1].split("\n\n")[0]
    named = re.findall(r"`(\.\w+)`", " ".join(row.split("|")[0] for row in table.split("\n|")[2:]))
    assert set(named) - {".array_record"} == FORMATS.keys()  # grain reads these


@pytest.mark.parametrize("base", ["memory://suffixes", ""])
def test_two_stars_are_folders_at_any_depth(tmp_path: Path, base: str) -> None:
    """Files of one depth alone were read."""
    import fsspec

    system = fsspec.filesystem("memory" if base else "file")
    for k, name in enumerate(["a", "x/b", "x/y/c", "x/y/b"]):
        path = f"{base or tmp_path}/{name}.csv"
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        system.pipe_file(path, f"v\n{k}\n".encode())
    root = base or str(tmp_path)
    for pattern, expected in {
        "**/*.csv": {"a": [0], "x/b": [1], "x/y/b": [3], "x/y/c": [2]},
        "x/**/*.csv": {"b": [1], "y/b": [3], "y/c": [2]},
        "**/{client}.csv": {"a": [0], "b": [1, 3], "c": [2]},
    }.items():
        source = load(f"{root}/{pattern}")
        values = np.split(source.column("v"), source.client_starts[1:-1])
        names = source.client_names
        assert {k: v.tolist() for k, v in zip(names, values, strict=True)} == expected
    with pytest.raises(ValueError, match=r"has \*\* behind a name in braces"):
        load(f"{root}/{{client}}/**/*.csv")


def test_the_first_suffix_that_a_folder_has_is_read(tmp_path: Path) -> None:
    """Files of .feather were read before those of .arrow, .jsonl and .csv."""
    feather.write_feather(pa.table({"x": [0]}), tmp_path / "a.feather")
    message = r"files that end with \.parquet, \.arrow, \.jsonl, \.csv\. Name"
    with pytest.raises(FileNotFoundError, match=message):
        load(tmp_path)
    for value, suffix in enumerate([".csv", ".jsonl", ".arrow", ".parquet"], 1):
        reader = FORMATS[suffix].read
        WRITERS[reader](np.array([value]), tmp_path / f"b{suffix}")
        assert load(tmp_path).column("x").tolist() == [value]
