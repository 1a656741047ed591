"""Tokens for pretraining: Megatron's .bin and .idx, and flat .bin and .npy, memory-mapped."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedpax.errors import ArgumentError
from fedpax.user_files.arrow_numpy import array_to_arrow, numpy_dtype
from fedpax.user_files.finding import DataFile, is_url
from fedpax.user_files.formats import ReadOptions

TOKENS = "tokens"
"""The column with the tokens of a document."""

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES: dict[int, Any] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, number of sequences and of documents
_CHUNK = 1 << 16  # tokens of an example of a file without documents
# llm.c's header has 256 integers: a magic number, a version, and the number of tokens
_LLM_C: dict[int, Any] = {20240520: np.uint16, 20240801: np.uint32}
_LLM_C_HEAD = 1024


def read_bin(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read Megatron's documents, or tokens alone without an .idx."""
    path = _local(file)
    index = path.with_suffix(".idx")
    if not index.is_file():
        return _chunks(_flat_tokens(path, index.name, options))
    with index.open("rb") as opened:
        head = opened.read(_HEAD.size)
        if len(head) < _HEAD.size or head[:9] != _MAGIC:
            raise ArgumentError(f"{index.name} is not an index of Megatron")
        _, version, code, num_sequences, num_documents = _HEAD.unpack(head)
        if version != 1 or code not in _DTYPES:
            raise ArgumentError(
                f"{index.name} has version {version} and type {code}, expected 1, 1-8"
            )
        if index.stat().st_size < _HEAD.size + 12 * num_sequences + 8 * num_documents:
            raise ArgumentError(f"{index.name} is cut off")
        sizes = np.fromfile(opened, "<i4", num_sequences).astype(np.int64)
        pointers = np.fromfile(opened, "<i8", num_sequences)
        documents = np.fromfile(opened, "<i8", num_documents)
    dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
    ends = np.cumsum(sizes)
    if (pointers != (ends - sizes) * dtype.itemsize).any():
        raise ArgumentError(f"{index.name} does not have its sequences one after another")
    total = int(ends[-1]) if len(ends) else 0
    if path.stat().st_size < total * dtype.itemsize:
        raise ArgumentError(f"it is cut off, expected {total} tokens of {dtype}")
    bounds = np.concatenate([[0], ends])
    if len(documents) and not 0 <= documents.min() <= documents.max() <= num_sequences:
        raise ArgumentError(f"{index.name} has documents outside of its sequences")
    offsets = np.unique(np.concatenate([[0], bounds[documents], [total]]))
    tokens = np.memmap(path, dtype, "r", shape=total) if total else np.zeros(0, dtype)
    return _documents(tokens, offsets)


def read_npy(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read tokens of one axis, 65,536 an example; or an example from each row."""
    del options
    array = np.load(_local(file), mmap_mode="r", allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        return pa.table({"array": array_to_arrow(np.asarray(array))})
    if not array.dtype.isnative:  # Arrow has the machine's byte order alone
        array = array.astype(array.dtype.newbyteorder("="))
    return _chunks(array)


def _flat_tokens(path: Path, index: str, options: ReadOptions) -> NDArray[Any]:
    """Map tokens whose type is stated, or in the header of llm.c."""
    size = path.stat().st_size
    with path.open("rb") as opened:
        head = opened.read(12)
    magic, _, count = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    data_type = options.types.get(TOKENS)
    if magic in _LLM_C:
        offset, dtype = _LLM_C_HEAD, np.dtype(_LLM_C[magic])
        if size != (expected := offset + count * dtype.itemsize):
            raise ArgumentError(
                f"it has {size} bytes, but its header says {count} tokens, expected {expected} "
                "bytes. Copy it again"
            )
    elif data_type is not None and pa.types.is_integer(data_type):
        offset, dtype = 0, numpy_dtype(data_type)
        if size % dtype.itemsize:
            raise ArgumentError(
                f"it has {size} bytes, which are no tokens of {dtype}, expected a multiple of "
                f"{dtype.itemsize}. Set another type in types={{'{TOKENS}': ...}}, or copy it again"
            )
    else:
        raise ArgumentError(
            f"there is no {index} beside it, which names the type of its tokens. For tokens alone, "
            f"state their type: types={{'{TOKENS}': 'uint16'}} (--data.types {TOKENS}=uint16)"
        )
    dtype = dtype.newbyteorder("<")
    return np.memmap(path, dtype, "r", offset) if size > offset else np.zeros(0, dtype)


def _local(file: DataFile) -> Path:
    if is_url(file.path):
        raise ArgumentError(
            "it is in a bucket, expected a local file, which is memory-mapped. Copy it"
        )
    if file.is_compressed:
        raise ArgumentError("it is compressed, but it is memory-mapped. Decompress it")
    return Path(file.path)


def _chunks(tokens: NDArray[Any]) -> pa.Table:
    """Return tokens without documents, 65,536 an example."""
    return _documents(tokens, np.append(np.arange(0, len(tokens), _CHUNK), len(tokens)))


def _documents(tokens: NDArray[Any], offsets: NDArray[np.int64]) -> pa.Table:
    values = pa.Array.from_buffers(
        pa.from_numpy_dtype(tokens.dtype), len(tokens), [None, pa.py_buffer(tokens)]
    )
    return pa.table({TOKENS: pa.LargeListArray.from_arrays(pa.array(offsets), values)})
