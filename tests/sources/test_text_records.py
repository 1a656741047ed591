"""Texts in array_record files of one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from tensorflow_datasets.proto import tf_example_pb2

from fedpax.data import Source, load, partition_by_field, token_rounds


def write_records(path: Path, records: Sequence[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def example_of(**fields: Any) -> bytes:
    example = tf_example_pb2.Example()
    for name, value in fields.items():
        feature = example.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        else:
            feature.int64_list.value.extend(value)
    return example.SerializeToString()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """Three files of seven texts, the first of which is empty."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    result = [rng.integers(97, 123, n).astype(np.uint8).tobytes() for n in range(0, 140, 20)]
    for number, part in enumerate((result[:3], result[3:4], result[4:])):
        write_records(folder / f"train-{number:05}.array_record", part)
    return folder, result


def test_files_are_read_in_order_as_texts(texts: tuple[Path, list[bytes]]) -> None:
    folder, result = texts
    source = load(f"{folder}/{{split}}-*.array_record", "train")
    assert isinstance(source, Source) and source.name == "train-*.array_record"
    assert [*source] == [{"text": text} for text in result]
    assert [*source.__getitems__([5, 0, -1])] == [{"text": result[n]} for n in (5, 0, -1)]
    assert [*source.column("text")] == result
    cohort = next(token_rounds(source, islands=1, local_steps=1, batch_size=2, seq_len=8))
    assert cohort.batches["inputs"].shape == (1, 1, 2, 8)
    with pytest.raises(IndexError, match="Index 7 is out of range"):
        source.__getitems__([0, 7])


def test_examples_have_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "e.array_record"
    rows = [(b"a b c", b"x", [3]), (b"d e", b"y", [4]), (b"f", b"x", [1, 2])]
    write_records(path, [example_of(body=t, site=s, n=n) for t, s, n in rows])
    source = load(str(path), "train")
    assert source[0] == {"body": b"a b c", "site": b"x", "n": 3} and source[2]["n"] == [1, 2]
    assert [part.tolist() for part in partition_by_field(source, "site", 2)] == [[0, 2], [1]]
    sizes: dict[str, Any] = {"islands": 1, "local_steps": 1, "batch_size": 1, "seq_len": 4}
    next(token_rounds(source, field="body", **sizes))
    with pytest.raises(KeyError, match=r"no field 'text', but .*'body'.*name one of these"):
        token_rounds(source, **sizes)


def test_files_that_cannot_be_read_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No file matches .*\{split\} in the name stands"):
        load(f"{tmp_path}/{{split}}.array_record", "train")
    (tmp_path / "bad.array_record").write_bytes(b"no records" * 9)
    with pytest.raises(OSError, match="cannot be read as array_record: write them with"):
        load(f"{tmp_path}/bad.array_record", "train")
    write_records(tmp_path / "empty.array_record", [])
    with pytest.raises(ValueError, match="have no records"):
        load(f"{tmp_path}/empty.array_record", "train")


def test_a_folder_that_exists_is_itself(tmp_path: Path) -> None:
    for name in ("corpus1", "corpus[1]", "{split}", "corpus*", "corpus1/in?"):
        (tmp_path / name).mkdir()
        write_records(tmp_path / name / "train-0.array_record", [name.encode()])
        write_records(tmp_path / name / "train-[1].array_record", [b"brackets"])
    for name in ("corpus1", "corpus[1]", "{split}", "corpus*", "corpus1/in?"):
        source = load(f"{tmp_path}/{name}/{{split}}-*.array_record", "train")
        assert [x["text"] for x in source] == [name.encode(), b"brackets"]
        single = load(f"{tmp_path}/{name}/train-[1].array_record", "train")
        assert [x["text"] for x in single] == [b"brackets"]
    several = load(f"{tmp_path}/c?rpus[[1]*/train-0.array_record", "train")
    assert {x["text"] for x in several} == {b"corpus1", b"corpus[1]"}
    with pytest.raises(FileNotFoundError, match="No file matches"):
        load(f"{tmp_path}/corpus[2]/train-*.array_record", "train")


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "train-0.array_record"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match=r"train-0\.\w+ is a Git LFS pointer.*git lfs pull"):
        load(f"{tmp_path}/{{split}}-*.array_record", "train")
