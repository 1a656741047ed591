"""Files of tokens are documents without a copy, and train as their texts do."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fedpax.data import BYTE_TOKENIZER, load, token_rounds
from fedpax.data.rounds.heldout_tokens import HeldoutRows


def write_megatron(path: Path, documents: list[list[Any]], dtype: Any, code: int) -> None:
    """Write documents of sequences of tokens as Megatron does."""
    sequences = [sequence for document in documents for sequence in document]
    path.write_bytes(b"".join(np.asarray(s, dtype).tobytes() for s in sequences))
    sizes = np.array([len(s) for s in sequences], np.int32)
    pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * np.dtype(dtype).itemsize
    ends = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(ends))
    content = head + sizes.tobytes() + pointers.tobytes() + ends.tobytes()
    path.with_suffix(".idx").write_bytes(content)


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4), (np.uint8, 1)])
def test_documents_of_megatron_are_views_of_the_file(tmp_path: Path, dtype: Any, code: int) -> None:
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(0, 200, rng.integers(1, 9)) for _ in range(rng.integers(1, 4))]
        for _ in range(12)
    ]
    write_megatron(tmp_path / "a.bin", documents, dtype, code)
    before = pa.total_allocated_bytes()
    source = load(tmp_path / "a.bin")
    assert pa.total_allocated_bytes() - before < 4096
    assert len(source) == 12 and source.client_starts is None
    for result, document in zip(source, documents, strict=True):
        assert result["tokens"].dtype == dtype
        np.testing.assert_array_equal(result["tokens"], np.concatenate(document))


def test_tokens_give_the_rows_of_their_texts(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    texts = ["".join(rng.choice([*"abcdé"], rng.integers(3, 60))) for _ in range(80)]
    tokens = [BYTE_TOKENIZER.encode(text) for text in texts]
    ended = [[np.append(t, BYTE_TOKENIZER.separator)] for t in tokens]  # as preprocessing writes
    write_megatron(tmp_path / "a.bin", ended, np.uint16, 8)
    sizes: Any = {"islands": 2, "local_steps": 2, "batch_size": 2, "seq_len": 16}
    source = load(tmp_path / "a.bin")
    result = token_rounds(source, field="tokens", **sizes)
    expected = token_rounds([{"text": text} for text in texts], **sizes)
    for _ in range(3):
        one, two = next(result).batches, next(expected).batches
        for name in two:
            np.testing.assert_array_equal(one[name], two[name])
    rows = [
        HeldoutRows(s, seq_len=16, field=f).read(np.arange(5))["inputs"]
        for s, f in ((source, "tokens"), ([{"text": t} for t in texts], "text"))
    ]
    np.testing.assert_array_equal(*rows)
    write_megatron(tmp_path / "b.bin", [[[3, 300]]], np.uint16, 8)
    with pytest.raises(ValueError, match=r"tokens 3 to 300, expected 0 to 255. Set the tokenizer"):
        token_rounds(load(tmp_path / "b.bin"), field="tokens", **sizes)


def test_arrays_of_one_axis_are_tokens_and_others_rows(tmp_path: Path) -> None:
    tokens = np.random.default_rng(2).integers(0, 9, 150_000).astype(np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    source = load(tmp_path / "a.npy")
    assert [len(example["tokens"]) for example in source] == [65_536, 65_536, 18_928]
    np.testing.assert_array_equal(np.concatenate(source.column("tokens")), tokens)
    np.save(tmp_path / "big_endian.npy", tokens.astype(">u4"))
    np.testing.assert_array_equal(
        np.concatenate(load(tmp_path / "big_endian.npy").column("tokens")), tokens
    )
    np.save(tmp_path / "b.npy", tokens.reshape(-1, 10))
    np.testing.assert_array_equal(load(tmp_path / "b.npy").column("array"), tokens.reshape(-1, 10))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32])
def test_tokens_alone_need_their_type(tmp_path: Path, dtype: Any) -> None:
    tokens = np.random.default_rng(3).integers(0, 60_000, 150_000).astype(dtype)
    tokens.tofile(tmp_path / "a.bin")
    types = {"tokens": np.dtype(dtype).name}
    before = pa.total_allocated_bytes()
    source = load(tmp_path / "a.bin", types=types)
    assert pa.total_allocated_bytes() - before < 4096
    assert [len(example["tokens"]) for example in source] == [65_536, 65_536, 18_928]
    assert source[0]["tokens"].dtype == dtype
    np.testing.assert_array_equal(np.concatenate(source.column("tokens")), tokens)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes()[:-1])
    with pytest.raises(ValueError, match=rf"bytes, which are no tokens of {types['tokens']}"):
        load(tmp_path / "a.bin", types=types)


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, np.uint16), (20240801, np.uint32)])
def test_tokens_behind_the_header_of_llm_c(tmp_path: Path, magic: int, dtype: Any) -> None:
    tokens = np.random.default_rng(4).integers(0, 50_000, 777).astype(dtype)
    head = np.zeros(256, np.int32)
    head[:3] = magic, 1, len(tokens)
    (tmp_path / "a.bin").write_bytes(head.tobytes() + tokens.tobytes())
    for types in (None, {"tokens": np.dtype(dtype).name}):
        np.testing.assert_array_equal(load(tmp_path / "a.bin", types=types)[0]["tokens"], tokens)
    (tmp_path / "a.bin").write_bytes(head.tobytes() + tokens.tobytes()[:-4])
    with pytest.raises(ValueError, match=r"its header says 777 tokens"):
        load(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b, i: i.unlink(), r"no a.idx beside it.*types=\{'tokens': 'uint16'\}"),
        (lambda b, i: i.write_bytes(b"x" * 60), "a.idx is not an index of Megatron"),
        (lambda b, i: i.write_bytes(i.read_bytes()[:50]), "a.idx is cut off"),
        (lambda b, i: b.write_bytes(b.read_bytes()[:-1]), "it is cut off, expected 6 tokens"),
        (lambda b, i: i.write_bytes(i.read_bytes()[:-8] + b"\xff" * 8), "documents outside"),
    ],
)
def test_damaged_files_are_told(tmp_path: Path, damage: Any, message: str) -> None:
    write_megatron(tmp_path / "a.bin", [[[1, 2, 3]], [[4, 5, 6]]], np.uint16, 8)
    damage(tmp_path / "a.bin", tmp_path / "a.idx")
    with pytest.raises(ValueError, match=f"a.bin cannot be read as bin: .*{message}"):
        load(tmp_path / "a.bin")
