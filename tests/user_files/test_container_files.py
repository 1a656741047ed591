"""Tests of files that contain examples as records or members: TFRecords and WebDataset's tar."""

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from user_files.written_tables import lines

from fedpax.data import load, prepare
from fedpax.user_files.readers import json_files, tar_files


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_a_tar_that_ends_or_is_damaged_between_members_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    write_tar(tmp_path / "a.tar", {f"{k:03}.txt": rng.bytes(20).hex().encode() for k in range(40)})
    whole = (tmp_path / "a.tar").read_bytes()
    assert len(load(tmp_path / "a.tar")) == 40
    for end in (30 * 1024, 30 * 1024 + 100):  # after a member, and in a header
        for damaged in (whole[:end], whole[:end] + rng.bytes(512) + whole[end + 512 :]):
            (tmp_path / "a.tar").write_bytes(damaged)
            with pytest.raises(ValueError, match=r"a.tar .*cut off or damaged, expected 512 zeros"):
                load(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(whole[: 30 * 1024] + bytes(1024))  # the remedy
    assert len(load(tmp_path / "a.tar")) == 30


def write_records(path: Path, examples: list[dict[str, Any]]) -> None:
    if path.suffix == ".tar":
        return write_tar(
            path, {f"{k:03}.json": json.dumps(row).encode() for k, row in enumerate(examples)}
        )
    path.write_bytes(lines(examples))


@pytest.mark.parametrize("name", ["a.jsonl", "a.tar"])
def test_columns_that_only_later_examples_have(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "_STREAM_BLOCK", 64)
    monkeypatch.setattr(tar_files, "_EXAMPLES_AT_ONCE", 5)
    late = [{"user": k % 3, "x": k, **({"y": 2 * k} if k > 20 else {})} for k in range(30)]
    write_records(tmp_path / name, late)
    wanted: list[Any] = [{}, {"columns": ["y", "x"]}, {"label": "y"}, {"types": {"y": "int32"}}]
    for number, options in enumerate(wanted):
        sources = (
            load(tmp_path / name, client="user", **options),
            prepare(tmp_path / name, tmp_path / f"out-{number}", client="user", **options).source,
        )
        for source in sources:
            y, x = source.column("y"), source.column("x")
            np.testing.assert_array_equal(np.ma.getmaskarray(y), x <= 20)
            np.testing.assert_array_equal(y.compressed(), 2 * x[x > 20])
    for options in ({"columns": ["x", "z"]}, {"types": {"z": "string"}}):
        with pytest.raises(ValueError, match=r"\[.\]='z' is not a column of .*'x'"):
            load(tmp_path / name, client="user", **options)
        with pytest.raises(ValueError, match=r"\[.\]='z' is not a column of .*'x'"):
            prepare(tmp_path / name, tmp_path / "none", client="user", **options)


def tfrecord(records: list[bytes]) -> bytes:
    """Frame records as TensorFlow does, with a bitwise CRC-32C."""

    def masked(content: bytes) -> int:
        crc = 0xFFFFFFFF
        for byte in content:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        crc ^= 0xFFFFFFFF
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    frames = []
    for record in records:
        length = struct.pack("<Q", len(record))
        frames += [length, struct.pack("<I", masked(length)), record]
        frames.append(struct.pack("<I", masked(record)))
    return b"".join(frames)


def test_tfrecords_of_examples(tmp_path: Path) -> None:
    from tensorflow_datasets.proto import tf_example_pb2

    rng = np.random.default_rng(7)
    expected = [
        {
            "user": str(rng.choice(["ann", "bö"])),
            "x": float(np.float32(rng.normal())),
            "n": rng.integers(-9, 9, 1 + k % 3).tolist(),
        }
        for k in range(20)
    ]
    records = []
    for row in expected:
        example = tf_example_pb2.Example()
        example.features.feature["user"].bytes_list.value.append(row["user"].encode())
        example.features.feature["x"].float_list.value.append(row["x"])
        example.features.feature["n"].int64_list.value.extend(row["n"])
        records.append(example.SerializeToString())
    content = tfrecord(records)
    for k in range(2):
        (tmp_path / f"{k}.tfrecord").write_bytes(tfrecord(records[k::2]))
    (tmp_path / "all.tfrecord.gz").write_bytes(gzip.compress(content))
    source = load(tmp_path / "all.tfrecord.gz", client="user", types={"user": "string"})
    assert source.client_names == ["ann", "bö"]
    ordered = sorted(expected, key=lambda row: row["user"])
    assert [{**row, "n": row["n"].tolist()} for row in source] == ordered
    assert source.column("x").dtype == np.float32  # as TensorFlow has it
    shards = load(tmp_path / "*.tfrecord")
    assert shards.client_starts is None and len(shards) == 20
    made = prepare(tmp_path / "all.tfrecord.gz", tmp_path / "out", client="user").source
    assert [row["x"] for row in made] == [row["x"] for row in source]
    for damaged, message in [
        (content[:-5], "record 19 is cut off"),
        (content[:40] + b"\0" + content[41:], "record 0 is damaged"),
        (b"\1" + content[1:], "record 0 has a damaged length"),
        (tfrecord([b"no example"]), "record 0 is not a tf.train.Example"),
        (
            b"\xff" * 8 + bytes.fromhex("a67b113a"),
            "record 0 has 18446744073709551615 bytes, expected at most 2 GiB",
        ),
    ]:
        (tmp_path / "a.tfrecord").write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"a.tfrecord cannot be read as tfrecord: {message}"):
            load(tmp_path / "a.tfrecord")


def test_a_group_of_a_tfrecord_is_a_client(tmp_path: Path) -> None:
    from tensorflow_datasets.proto import tf_example_pb2

    rng = np.random.default_rng(9)
    sizes = [[3, 1], [2]]
    values = [[rng.integers(0, 99, size).tolist() for size in file] for file in sizes]
    for number, groups in enumerate(values):
        records = []
        for group in groups:
            sequence = tf_example_pb2.SequenceExample()
            features = sequence.feature_lists.feature_list["serialized_bytes"].feature
            for value in group:
                example = tf_example_pb2.Example()
                example.features.feature["x"].int64_list.value.append(value)
                features.add().bytes_list.value.append(example.SerializeToString())
            records.append(sequence.SerializeToString())
        (tmp_path / f"a-{number}-of-2.tfrecord").write_bytes(tfrecord(records))
    source = load(tmp_path / "*.tfrecord")
    assert source.client_names == ["a-0-of-2:0000000", "a-0-of-2:0000001", "a-1-of-2:0000000"]
    assert source.client_starts.tolist() == [0, 3, 4, 6]
    assert source.column("x").tolist() == [x for file in values for group in file for x in group]
    made = prepare(tmp_path / "*.tfrecord", tmp_path / "out").source
    assert made.client_names == source.client_names
    assert made.column("x").tolist() == source.column("x").tolist()
    (tmp_path / "b.tfrecord").write_bytes(tfrecord([records[0], example.SerializeToString()]))
    with pytest.raises(ValueError, match="record 1 and those before are not all groups"):
        load(tmp_path / "b.tfrecord")


def test_web_data_sets(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    images = rng.integers(0, 256, (5, 6, 4, 3), np.uint8)
    vectors = rng.normal(size=(5, 3))
    with tarfile.open(tmp_path / "shard-0.tar", "w") as archive:

        def add(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

        for k in range(5):
            for suffix, content in {
                "png": png(images[k]),
                "cls": str(k % 2).encode(),
                "json": json.dumps({"writer": ["bö", "ann"][k % 2], "age": k}).encode(),
                "txt": f"é{k}".encode(),
                "vector.npy": npy(vectors[k]),
                "npy": npy(vectors[k]),
            }.items():
                add(f"data/{k:03}.{suffix}", content)
    source = load(tmp_path / "shard-*.tar", client="writer", label="label")
    order = [1, 3, 0, 2, 4]
    assert source.client_names == ["ann", "bö"]
    np.testing.assert_array_equal(source.column("image"), images[order])
    np.testing.assert_array_equal(source.column("array"), vectors[order])
    assert source.column("label").tolist() == [1, 1, 0, 0, 0]
    assert source[0]["key"] == "data/001" and source[0]["text"] == "é1" and source[0]["age"] == 1
    content = (tmp_path / "shard-0.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[:3000])
    with pytest.raises(ValueError, match=r"cut.tar cannot be read as tar"):
        load(tmp_path / "cut.tar")


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()
