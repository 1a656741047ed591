import contextlib
import lzma
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow_datasets.proto import tf_example_pb2

from fedpax.sources.federated_archive import (
    Archive,
    ArchiveError,
    Feature,
    check,
    count_examples,
    decompress,
    open_database,
    read_examples,
)

FEATURES = {
    "text": Feature("bytes_list"),
    "pixels": Feature("float_list", 3),
    "label": Feature("int64_list"),
}


def serialize(text: bytes, pixels: list[float], label: int) -> bytes:
    example = tf_example_pb2.Example()
    example.features.feature["text"].bytes_list.value.append(text)
    example.features.feature["pixels"].float_list.value.extend(pixels)
    example.features.feature["label"].int64_list.value.append(label)
    return example.SerializeToString()


def write(database: Path, rows: list[tuple[str, str, bytes]]) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
            "serialized_example_proto BLOB NOT NULL)"
        )
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    connection.close()


def read(database: Path, split: str = "train") -> list[tuple[str, dict]]:
    with open_database(database) as connection:
        return list(read_examples(connection, split, FEATURES))


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)


@settings(deadline=None, max_examples=20)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["train", "test"]),
            TEXTS,
            st.binary(max_size=20),
            st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3),
            st.integers(-(2**63), 2**63 - 1),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_reads_the_rows_sorted_by_client(
    tmp_path_factory: pytest.TempPathFactory, rows: list
) -> None:
    database = tmp_path_factory.mktemp("database") / "database.sqlite"
    write(database, [(split, client, serialize(*values)) for split, client, *values in rows])
    for split in {row[0] for row in rows}:
        expected = sorted((row for row in rows if row[0] == split), key=lambda row: row[1])
        content = read(database, split)
        with open_database(database) as connection:
            assert count_examples(connection, split) == len(expected) == len(content)
        for (client, values), (_, name, text, pixels, label) in zip(content, expected, strict=True):
            assert client == name
            assert values["text"] == text
            assert values["pixels"].dtype == np.float32
            assert values["pixels"].tolist() == pixels
            assert values["label"].dtype == np.int64
            assert values["label"].tolist() == [label]


def test_reads_one_example_at_a_time(tmp_path: Path) -> None:
    good = serialize(b"good", [1, 2, 3], 4)
    write(tmp_path / "database", [("train", "a", good), ("train", "b", b"\xff\xff no proto")])
    with open_database(tmp_path / "database") as connection:
        examples = read_examples(connection, "train", FEATURES)
        assert next(examples)[1]["text"] == b"good"  # the bad example is not read yet
        with pytest.raises(ArchiveError, match=r"bad example, index 1 of split 'train', client 'b"):
            next(examples)


def test_a_missing_feature_is_named(tmp_path: Path) -> None:
    example = tf_example_pb2.Example.FromString(serialize(b"", [1, 2, 3], 4))
    del example.features.feature["label"]
    write(tmp_path / "database", [("train", "a", example.SerializeToString())])
    with pytest.raises(ArchiveError, match=r"no feature 'label', but 'pixels', 'text'"):
        read(tmp_path / "database")
    write(tmp_path / "empty", [("train", "a", b"")])
    with pytest.raises(ArchiveError, match=r"no feature 'text', but none"):
        read(tmp_path / "empty")


def test_a_feature_of_another_kind_or_size_raises(tmp_path: Path) -> None:
    write(tmp_path / "size", [("train", "a", serialize(b"", [1, 2], 4))])
    with pytest.raises(ArchiveError, match=r"feature 'pixels' has 2 values, not 3"):
        read(tmp_path / "size")
    example = tf_example_pb2.Example.FromString(serialize(b"", [1, 2, 3], 4))
    example.features.feature["label"].bytes_list.value.append(b"4")
    write(tmp_path / "kind", [("train", "a", example.SerializeToString())])
    with pytest.raises(ArchiveError, match=r"feature 'label' is a bytes_list, not a int64_list"):
        read(tmp_path / "kind")


def test_an_unknown_split_raises_and_lists_the_existing_ones(tmp_path: Path) -> None:
    row = serialize(b"", [1, 2, 3], 4)
    write(tmp_path / "database", [("train", "a", row), ("heldout", "a", row)])
    with (
        open_database(tmp_path / "database") as connection,
        pytest.raises(ArchiveError, match=r"no split 'test', but 'heldout', 'train'"),
    ):
        count_examples(connection, "test")


def test_a_file_that_is_no_database_raises(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "noise").write_bytes(rng.bytes(5000))
    with (
        pytest.raises(ArchiveError, match=r"not hold a valid SQLite database"),
        open_database(tmp_path / "noise"),
    ):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "other")) as connection:
        connection.execute("CREATE TABLE examples (client_id, other)")
    with (
        pytest.raises(ArchiveError, match=r"but one with client_id, other"),
        open_database(tmp_path / "other"),
    ):
        pass
    (tmp_path / "empty").touch()
    with (
        pytest.raises(ArchiveError, match=r"but no table of that name"),
        open_database(tmp_path / "empty"),
    ):
        pass


def test_a_truncated_database_raises(tmp_path: Path) -> None:
    row = serialize(b"x" * 500, [1, 2, 3], 4)
    write(tmp_path / "database", [("train", f"{k}", row) for k in range(200)])
    contents = (tmp_path / "database").read_bytes()
    (tmp_path / "database").write_bytes(contents[: len(contents) // 2 // 4096 * 4096])
    with pytest.raises(ArchiveError, match=r"not hold a valid SQLite database"):
        read(tmp_path / "database")


@pytest.mark.parametrize("kind", [lzma.FORMAT_XZ, lzma.FORMAT_ALONE])
def test_decompresses_both_formats_and_detects_damage(
    tmp_path: Path, rng: np.random.Generator, kind: int
) -> None:
    contents = rng.integers(0, 4, 2_100_000, np.uint8).tobytes()  # several blocks
    compressed = lzma.compress(contents, kind, preset=0)
    (tmp_path / "archive").write_bytes(compressed)
    decompress(tmp_path / "archive", tmp_path / "database")
    assert (tmp_path / "database").read_bytes() == contents
    (tmp_path / "archive").write_bytes(compressed[:-5000])
    with pytest.raises(ArchiveError, match=r"damaged or incomplete"):
        decompress(tmp_path / "archive", tmp_path / "database")
    (tmp_path / "archive").write_bytes(b"<html>no such file</html>")
    with pytest.raises(ArchiveError, match=r"damaged or incomplete"):
        decompress(tmp_path / "archive", tmp_path / "database")


def test_checks_size_and_sha256(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4
    check(path, Archive("https://host/folder/archive"))
    check(path, Archive("https://host/folder/archive", 3, digest))
    with pytest.raises(ArchiveError, match=r"has 3 bytes, not 4"):
        check(path, Archive("https://host/folder/archive", 4, digest))
    path.write_bytes(b"abd")
    with pytest.raises(ArchiveError, match=r"has SHA-256 \w{16}..., not ba7816bf8f01cfea..."):
        check(path, Archive("https://host/folder/archive", 3, digest))
    assert Archive("https://host/folder/archive.sqlite.lzma").filename == "archive.sqlite.lzma"
