"""Every format gives the arrays that were written, by client, and is told where it is damaged."""

import gzip
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import feather, ipc, parquet
from user_files.written_tables import lines

from fedpax.data import load, prepare
from fedpax.user_files import selection


def rows(rng: np.random.Generator, size: int) -> list[dict[str, Any]]:
    return [
        {
            "user": str(rng.choice(["ann", "bö", "東"])),
            "x": float(rng.normal()),
            "words": [int(w) for w in rng.integers(0, 9, rng.integers(0, 4))],
            "text": "tab\t" * int(rng.integers(3)) + "ü",
        }
        for _ in range(size)
    ]


def write_ipc(table: pa.Table, path: Path, *, stream: bool) -> None:
    make = ipc.new_stream if stream else ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


WRITERS: dict[str, Callable[[list[dict[str, Any]], Path], Any]] = {
    "a.jsonl": lambda r, path: path.write_bytes(lines(r)),
    "bom.jsonl": lambda r, path: path.write_bytes(b"\xef\xbb\xbf" + lines(r)),
    "lines.json": lambda r, path: path.write_bytes(lines(r)),
    "list.json": lambda r, path: path.write_text(json.dumps(r)),
    "a.jsonl.gz": lambda r, path: path.write_bytes(gzip.compress(lines(r))),
    "a.jsonl.zst": lambda r, path: path.write_bytes(pa.compress(lines(r), "zstd", asbytes=True)),
    "stream.arrow": lambda r, path: write_ipc(pa.Table.from_pylist(r), path, stream=True),
    "file.arrow": lambda r, path: write_ipc(pa.Table.from_pylist(r), path, stream=False),
    "a.feather": lambda r, path: feather.write_feather(pa.Table.from_pylist(r), path),
    "a.parquet": lambda r, path: parquet.write_table(pa.Table.from_pylist(r), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_examples_of_rows(tmp_path: Path, name: str) -> None:
    examples = rows(np.random.default_rng(0), 37)
    WRITERS[name](examples, tmp_path / name)
    source = load(tmp_path / name, client="user")
    expected = sorted(examples, key=lambda example: example["user"])
    assert len(source) == 37 and source.client_names == sorted({e["user"] for e in examples})
    for result, example in zip(source, expected, strict=True):
        assert result["words"].tolist() == example["words"]
        assert {**result, "words": example["words"]} == example


def test_arrays_in_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", 6, np.uint8, external=[(str(tmp_path / "secret.txt"), 0, 6)])
    with h5py.File(tmp_path / "b.h5", "w") as file:
        layout = h5py.VirtualLayout((3,), np.int64)
        layout[:] = h5py.VirtualSource("other.h5", "y", (3,))
        file.create_virtual_dataset("x", layout)
    for name in ("a.h5", "b.h5"):
        with pytest.raises(ValueError, match=rf"{name} .*'x' is stored in another file"):
            load(tmp_path / name)


def test_sizes_beyond_the_memory_are_told(tmp_path: Path) -> None:
    header = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (2**58,)}
    np.lib.format.write_array_header_1_0(header, about)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("1.npy")
        member.size = len(header.getvalue())
        archive.addfile(member, io.BytesIO(header.getvalue()))
    with pytest.raises(ValueError, match=r"a.tar cannot be read as tar: Unable to allocate"):
        load(tmp_path / "a.tar")


def test_sparse_members_are_not_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("1.x")
        member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(10**13)}
        archive.addfile(member)
    assert (tmp_path / "a.tar").stat().st_size < 20_000
    with pytest.raises(ValueError, match=r"its member 1\.x is sparse, expected whole files"):
        load(tmp_path / "a.tar")


@pytest.mark.parametrize(
    "members", [{"1.jpg": b"a", "1.png": b"b"}, {"1.cls": b"3", "1.json": b'{"label": 7}'}]
)
def test_members_that_are_one_column_are_told(tmp_path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    told = r"its example '1' has two values of '(image'.*such as 1.mask|label'.*a.tar '\*.cls')\.$"
    with pytest.raises(ValueError, match=told):
        load(tmp_path / "a.tar")
    if "1.cls" in members and shutil.which("tar") and sys.platform == "linux":  # GNU's
        subprocess.run(
            ["tar", "--delete", "--wildcards", "-f", tmp_path / "a.tar", "*.cls"], check=True
        )
        assert load(tmp_path / "a.tar").column("label").tolist() == [7]


def test_hdf5_of_tensorflow_federated(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    pixels = {name: rng.random((n, 4, 4), np.float32) for name, n in [("f01_2", 3), ("f00", 2)]}
    with h5py.File(tmp_path / "train.h5", "w") as file:
        for name, x in pixels.items():
            group = file.create_group(f"examples/{name}")
            group["pixels"], group["label"] = x, np.arange(len(x), dtype=np.int32)
            group["snippets"] = np.array([f"n{k}é" for k in range(len(x))], h5py.string_dtype())
    source = load(tmp_path / "train.h5")
    assert source.client_names == ["f00", "f01_2"] and source.client_starts.tolist() == [0, 2, 5]
    np.testing.assert_array_equal(
        source.column("pixels"), np.concatenate([pixels["f00"], pixels["f01_2"]])
    )
    assert source[4]["snippets"] == "n2é" and source[4]["pixels"].dtype == np.float32
    with h5py.File(tmp_path / "bytes.h5", "w") as file:  # UTF-8 in bytes without an encoding
        file["examples/u/text"] = np.array(["né".encode(), b"a"])
    assert load(tmp_path / "bytes.h5").column("text").tolist() == ["né", "a"]
    with h5py.File(tmp_path / "flat.hdf5", "w") as file:
        file["x"] = np.arange(5)
    assert load(tmp_path / "flat.hdf5").column("x").tolist() == [0, 1, 2, 3, 4]


def test_npz_is_a_client_each_and_never_unpickled(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = {
        name: rng.integers(0, 256, (n, 3, 3, 1), np.uint8) for name, n in [("b", 2), ("a", 4)]
    }
    for name, image in arrays.items():
        np.savez(tmp_path / f"{name}.npz", image=image, label=np.arange(len(image)))
    source = load(tmp_path / "*.npz")
    assert source.client_names == ["a", "b"]
    images = source.take([5, 0])["image"]
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(images, [arrays["b"][1], arrays["a"][0]])
    assert load(tmp_path / "a.npz", columns=["label"]).fields == ("label",)
    np.savez(tmp_path / "c.npz", x=np.array([object()]))
    with pytest.raises(ValueError, match=r"c.npz cannot be read as npz: .*allow_pickle"):
        load(tmp_path / "c.npz")
    np.savez(tmp_path / "c.npz", x=np.zeros(2), y=np.zeros(3))
    with pytest.raises(ValueError, match=r"'x': 2, 'y': 3.* examples, expected one number"):
        load(tmp_path / "c.npz")


def test_images_in_folders(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    expected = {}
    for client, label, n in [("ann", "cat", 3), ("ann", "dog", 1), ("bö", "cat", 2)]:
        (tmp_path / client / label).mkdir(parents=True)
        for k in range(n):
            pixels = rng.integers(0, 256, (5, 4, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / client / label / f"{k}.png")
            expected[client, label, k] = pixels
    pattern = str(tmp_path / "{client}" / "{label}" / "*.png")
    source = load(pattern, label="label")
    assert source.client_names == ["ann", "bö"] and source.client_starts.tolist() == [0, 4, 6]
    assert source.column("label").tolist() == ["cat"] * 3 + ["dog"] + ["cat"] * 2
    np.testing.assert_array_equal(source.column("image"), list(expected.values()))
    single = load(tmp_path / "bö" / "cat" / "*.png")
    assert single.client_starts is None and len(single) == 2
    gray = rng.integers(0, 256, (7, 7), np.uint8)
    Image.fromarray(gray).save(tmp_path / "bö" / "cat" / "9.png")
    with pytest.raises(ValueError, match=r"is 5 x 4 and .*9.png is 7 x 7.*image_size="):
        load(pattern)
    assert load(pattern, image_size=(8, 6)).column("image").shape == (7, 8, 6, 3)
    np.testing.assert_array_equal(load(tmp_path / "bö" / "cat" / "9.png")[0]["image"][..., 0], gray)
    (tmp_path / "bö" / "cat" / "9.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises(ValueError, match=r"9.png is not a readable image"):
        load(pattern)


def test_gray_and_colored_images_in_parts_read_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_IMAGES_AT_ONCE", 2)
    rng = np.random.default_rng(9)
    for k in range(6):
        pixels = rng.integers(0, 256, (4, 4, 3) if k >= 3 else (4, 4), np.uint8)
        (tmp_path / f"{k % 2}").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / f"{k % 2}" / f"{k}.png")
    pattern = f"{tmp_path}/{{client}}/*.png"
    images = load(pattern).column("image")
    np.testing.assert_array_equal(prepare(pattern, tmp_path / "out").source.column("image"), images)
    monkeypatch.setattr(selection, "_IMAGES_AT_ONCE", 100)
    np.testing.assert_array_equal(load(pattern).column("image"), images)
    Image.fromarray(np.zeros((5, 4), np.uint8)).save(tmp_path / "1" / "9.png")
    monkeypatch.setattr(selection, "_IMAGES_AT_ONCE", 1)
    with pytest.raises(ValueError, match=r"9.png, expected one type. Set image_size="):
        load(pattern)
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "1" / "9.png")
    with pytest.raises(
        ValueError, match=r"9.png is not a readable image: its pixels have more than 8"
    ):
        load(pattern)


def hugging_face_table(rng: np.random.Generator, size: int) -> tuple[pa.Table, np.ndarray]:
    """A table as `datasets` writes it: an image feature in the schema's metadata."""
    pixels = rng.integers(0, 256, (size, 4, 4, 1), np.uint8)
    encoded = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image[..., 0]).save(stream, "PNG")
        encoded.append({"bytes": stream.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"img": pa.array(encoded, kind), "writer": rng.integers(0, 4, size)})
    features = {"img": {"_type": "Image"}, "writer": {"dtype": "int64", "_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return table.replace_schema_metadata(metadata), pixels


def test_save_to_disk_with_images_in_shards_and_splits(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    table, pixels = hugging_face_table(rng, 11)
    (tmp_path / "set" / "train").mkdir(parents=True)
    names = [f"data-0000{k}-of-00002.arrow" for k in range(2)]
    for name, part in zip(names, (table[:6], table[6:]), strict=True):
        write_ipc(part, tmp_path / "set" / "train" / name, stream=True)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (tmp_path / "set" / "train" / "state.json").write_text(json.dumps(state))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    plain = load(tmp_path / "set" / "train")
    assert plain.client_starts is None  # shards are not clients
    np.testing.assert_array_equal(plain.column("img"), pixels)
    writers = np.array(table["writer"])
    source = load(str(tmp_path / "set"), "train", client="writer")
    assert source.client_names == sorted({*writers.tolist()})
    np.testing.assert_array_equal(source.column("img"), pixels[np.argsort(writers, kind="stable")])
    with pytest.raises(ValueError, match=r"splits train, test, but split is None"):
        load(tmp_path / "set")
    state["_data_files"] = [{"filename": "../../secret.arrow"}]  # type: ignore[list-item]
    (tmp_path / "set" / "train" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"names '../../secret.arrow', expected a file"):
        load(tmp_path / "set" / "train")


def test_arrays_of_hugging_face_keep_their_shape(tmp_path: Path) -> None:
    x = np.random.default_rng(6).integers(0, 256, (6, 2, 3), np.uint8)
    values = pa.array([*x.tolist(), None], pa.list_(pa.list_(pa.uint8())))
    features = {"x": {"shape": [2, 3], "dtype": "uint8", "_type": "Array2D"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"x": values, "user": [0] * 7}).replace_schema_metadata(metadata)
    parquet.write_table(table[:6], tmp_path / "a.parquet")
    made = prepare(tmp_path / "a.parquet", tmp_path / "out", client="user").source
    for source in (load(table[:6]), load(tmp_path / "a.parquet"), made):
        np.testing.assert_array_equal(source.column("x"), x, strict=True)
    assert load(table).table.column("x").to_pylist() == table.column("x").to_pylist()


@pytest.mark.parametrize(
    "names",
    [
        {"train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
         "validation": ["data/validation-00000-of-00001.parquet"]},
        {"train": ["train/0.parquet", "train/1.parquet"], "validation": ["dev/0.parquet"]},
    ],
)  # fmt: skip
def test_folders_of_the_hub(tmp_path: Path, names: dict[str, list[str]]) -> None:
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / "script.py").write_text("raise SystemExit('it ran')")
    expected = {}
    for split, files in names.items():
        expected[split] = []
        for file in files:
            values = np.random.default_rng(len(file)).integers(0, 99, 5)
            (tmp_path / file).parent.mkdir(exist_ok=True)
            parquet.write_table(pa.table({"x": values}), tmp_path / file)
            expected[split] += values.tolist()
    for split, values in expected.items():
        assert load(str(tmp_path), split).column("x").tolist() == values
    kept = load(tmp_path, "train", heldout_fraction=0.4).column("x").tolist()
    held = load(tmp_path, "heldout", heldout_fraction=0.4).column("x").tolist()
    assert sorted(kept + held) == sorted(expected["train"])
    with pytest.raises(ValueError, match="splits train, validation, but split is 'test'"):
        load(tmp_path, "test")


def test_folders_without_data(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    for name in (tmp_path, str(tmp_path)):
        with pytest.raises(FileNotFoundError, match=r"has no data set.*\{client\}/\*.jpg"):
            load(name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"a": 1}\n{"a": "x"}\n',
            r"Column\(/a\) changed from number to string in line 2. Write all",
        ),
        ("a.jsonl", b'{"a": 1}\n{"a":', r"cannot be read as jsonl"),
        ("a.jsonl", b"", r"is empty, expected at least one example"),
        ("a.json", b'[{"a": 1}', r"cannot be read as json"),
        ("a.arrow", b"ARROW1 and no more", r"cannot be read as arrow"),
        ("a.h5", b"\x89HDF and no more", r"cannot be read as h5"),
        ("a.npz", b"PK and no more", r"cannot be read as npz"),
        ("a.csv.gz", b"\x1f\x8b and no more", r"cannot be read as csv"),
        ("a.jsonl.zst", b"(\xb5/\xfd and no more", r"cannot be read as jsonl"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as messages:
        load(tmp_path / name)
    assert str(tmp_path / name) in str(messages.value)


def test_arrays_that_are_cut_off_or_cannot_be_mapped_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=999))
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a.npz cannot be read as npz: File is not a zip"):
        load(tmp_path / "a.npz")
    np.save(tmp_path / "a.npy", np.arange(9))
    compressed = gzip.compress((tmp_path / "a.npy").read_bytes())
    (tmp_path / "a.npy.gz").write_bytes(compressed)
    with pytest.raises(ValueError, match=r"it is compressed, but it is memory-mapped. Decompress"):
        load(tmp_path / "a.npy.gz")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "file.arrow"])
def test_truncated_files_are_named(tmp_path: Path, name: str) -> None:
    WRITERS[name](rows(np.random.default_rng(6), 400), tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(ValueError, match="cannot be read as"):
        load(tmp_path / name)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "a.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"h5py.*pip install 'fedpax\[files\]'"):
        load(tmp_path / "a.h5")


@pytest.mark.parametrize(
    "suffix", ["csv", "parquet", "arrow", "jsonl", "json", "npz", "h5", "tar", "tfrecord"]
)
@pytest.mark.parametrize("content", [b"", b"\x80\x04PK\x03"])
def test_empty_and_foreign_files_are_told(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"é.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"é\."):
        load(path)
    with pytest.raises(ValueError, match=r"é\."):
        prepare(path, tmp_path / "out")


@pytest.mark.parametrize("suffix", ["tar", "tfrecord"])
def test_files_without_examples_are_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(bytes(1024) if suffix == "tar" else b"")
    with pytest.raises(ValueError, match=r"(it has no examples|is empty), expected at least one"):
        load(path)


def test_names_of_clients_in_bytes_are_texts_if_they_are_utf8(tmp_path: Path) -> None:
    names = pa.array(["東".encode(), b"a", b"a"])
    parquet.write_table(pa.table({"who": names, "x": [1, 2, 3]}), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet", client="who").client_names == ["a", "東"]
    assert prepare(tmp_path / "a.parquet", tmp_path / "out", client="who").source.client_names == [
        "a",
        "東",
    ]
    other = load(pa.table({"who": pa.array([b"\xff", b"a"])}), client="who")
    assert other.client_names == [b"a", b"\xff"]
