"""Messages: round trips are exact, and malformed streams are refused before memory is used."""

import itertools
import json
import zlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.transport.message import (
    CHUNK_BYTES,
    ChecksumError,
    Message,
    MessageError,
    decode,
    encode,
)

DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128 int2 int4 uint2 uint4 bfloat16 float4_e2m1fn float8_e3m4 float8_e4m3 "
    "float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
LIMIT = 1 << 24


def random_array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu" or "int" in dtype.name:
        info = ml_dtypes.iinfo(dtype)
        return rng.integers(
            int(info.min), int(info.max), shape, np.int64 if info.min else np.uint64
        ).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def assert_same(received: np.ndarray, sent: np.ndarray) -> None:
    assert (received.shape, received.dtype) == (sent.shape, sent.dtype)
    assert received.tobytes() == sent.tobytes()


arrays = st.builds(
    lambda seed, dtype, shape: random_array(np.random.default_rng(seed), dtype, tuple(shape)),
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=4),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    header=st.dictionaries(st.text(), json_values, max_size=4),
    arrays=st.dictionaries(st.text(), arrays, max_size=5),
)
def test_random_messages_round_trip(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    received = decode(encode(Message(header, arrays), LIMIT), LIMIT)
    assert received.header == header
    assert list(received.arrays) == list(arrays)
    for name, array in arrays.items():
        assert_same(received.arrays[name], array)
        assert received.arrays[name].flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_jax_round_trips(dtype: str) -> None:
    array = random_array(np.random.default_rng(1), dtype, (3, 5))
    if dtype not in ("int64", "uint64", "float64", "complex128"):
        assert jnp.asarray(array).dtype == array.dtype  # as JAX has it
    assert_same(decode(encode(Message({}, {"x": array}), LIMIT), LIMIT).arrays["x"], array)


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_arrays_at_the_edges_of_chunks(size: int) -> None:
    rng = np.random.default_rng(size)
    sent = {"a": rng.integers(0, 256, 7, np.uint8), "b": rng.integers(0, 256, size, np.uint8)}
    chunks = list(encode(Message({}, sent), LIMIT))
    assert len(chunks) == 1 + -(-(size + 7) // CHUNK_BYTES)  # small arrays share chunks
    received = decode(chunks, LIMIT).arrays
    assert_same(received["a"], sent["a"])
    assert_same(received["b"], sent["b"])


def test_layouts_and_kinds_of_arrays() -> None:
    matrix = np.random.default_rng(2).normal(size=(4, 6))
    sent = {
        "transposed": matrix.T,
        "strided": matrix[::2, ::-1],
        "big-endian": matrix.astype(">f8"),
        "of JAX": jnp.asarray(matrix, jnp.bfloat16),
        "scalar": np.float32(1.5),
    }
    received = decode(encode(Message({}, sent), LIMIT), LIMIT).arrays
    assert_same(received["transposed"], np.array(matrix.T, order="C"))
    assert_same(received["strided"], np.array(matrix[::2, ::-1], order="C"))
    assert_same(received["big-endian"], matrix)
    assert_same(received["of JAX"], matrix.astype(np.float32).astype(ml_dtypes.bfloat16))
    assert_same(received["scalar"], np.array(1.5, np.float32))


def stream(content: bytes, *bodies: bytes) -> list[bytes]:
    """Chunks with correct checksums and any content."""
    checksum, chunks = 0, []
    for body in (content, *bodies):
        checksum = zlib.crc32(body, checksum)
        chunks.append(checksum.to_bytes(4, "little") + body)
    return chunks


def header(content: Any) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    return b"fedpax message 1\n" + text.encode()


def declare(*arrays: Any) -> bytes:
    return header({"header": {}, "arrays": list(arrays)})


MALFORMED = {
    "nothing": ([], "ends before its header"),
    "garbage": ([np.random.default_rng(0).bytes(300)], "does not have its checksum"),
    "an empty chunk": ([b""], "does not have its checksum"),
    "another format": (stream(b"GET / HTTP/1.1\r\n"), "begins with b'GET / HTTP/1.1"),
    "another version": (stream(b"fedpax message 2\n{}"), "same version of fedpax on both sides"),
    "no JSON": (stream(header('{"header": {')), "is not JSON"),
    "not UTF-8": (stream(header("") + b"\xff\xfe"), "is not JSON"),
    "NaN": (stream(header('{"header": {"x": NaN}, "arrays": []}')), "NaN is not JSON"),
    "deep JSON": (stream(header("[" * 500_000)), "is not JSON"),
    "a huge number": (stream(header("9" * 10_000)), "is not JSON"),
    "a list": (stream(header([1, 2])), r"expected a dict with `header` and `arrays`"),
    "no arrays": (stream(header({"header": {}})), r"expected a dict with `header` and `arrays`"),
    "more fields": (stream(header({"header": {}, "arrays": [], "code": 1})), "expected a dict"),
    "an array of wrong form": (stream(declare("x")), "expected a new name"),
    "a nameless array": (stream(declare([3, "int8", [1]])), "expected a new name"),
    "a name twice": (stream(declare(*2 * [["x", "int8", [1]]]), b"12"), "expected a new name"),
    "an unknown dtype": (stream(declare(["x", "object", [1]])), "a dtype of JAX's arrays"),
    "a dtype of NumPy's language": (stream(declare(["x", ">f4", [1]])), "a dtype of JAX's arrays"),
    "a negative size": (stream(declare(["x", "int8", [-4]])), "sizes >= 0"),
    "sizes of both signs": (stream(declare(["x", "int8", [-4, -4]])), "sizes >= 0"),
    "a size that is a truth value": (stream(declare(["x", "int8", [True]])), "sizes >= 0"),
    "a fractional size": (stream(declare(["x", "int8", [1.5]])), "sizes >= 0"),
    "many dimensions": (stream(declare(["x", "int8", 33 * [1]])), "at most 32 sizes"),
    "an oversized array": (stream(declare(["x", "float32", [2**40]])), "at most max_message_bytes"),
    "a size beyond int64": (stream(declare(["x", "int8", [2**70]])), "at most max_message_bytes"),
    "sizes of thousands of digits": (
        stream(declare(["x", "int8", [10**4000, 10**4000]])),
        "more than 2.*max_message_bytes",
    ),
    "an oversized empty array": (stream(declare(["x", "int8", [2**70, 0]])), "max_message_bytes"),
    "an oversized sum": (
        stream(declare(*([f"x{i}", "int8", [LIMIT // 2]] for i in range(3)))),
        "Send smaller fragments, or raise max_message_bytes",
    ),
    "too few bytes": (
        stream(declare(["x", "int8", [CHUNK_BYTES + 3]]), bytes(CHUNK_BYTES)),
        f"ends after {CHUNK_BYTES} of {CHUNK_BYTES + 3} bytes",
    ),
    "a short chunk": (
        stream(declare(["x", "int8", [3]]), b"12", b"3"),
        "chunk of 2 bytes after 0 of 3",
    ),
    "too many bytes": (stream(declare(["x", "int8", [3]]), b"1234"), "4 bytes after 0 of 3 bytes"),
    "bytes of no array": (stream(declare(), b"1"), "chunk of 1 bytes after 0 of 0 bytes"),
    "an empty body after the end": (stream(declare(), b""), "chunk of 0 bytes after 0 of 0 bytes"),
    "an empty body": (
        stream(declare(["x", "int8", [1]]), b"", b"1"),
        "chunk of 0 bytes after 0 of 1",
    ),
    "a chunk that is too large": (stream(declare(), bytes(CHUNK_BYTES + 1)), "expected at most"),
    "a truth value of 2": (stream(declare(["x", "bool", [2]]), b"\1\2"), "other than 0 and 1"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_streams_are_refused(name: str) -> None:
    chunks, words = MALFORMED[name]
    with pytest.raises(MessageError, match=words):
        decode(iter(chunks), LIMIT)


def test_declared_sizes_are_refused_before_the_next_chunk_is_read() -> None:
    read = []

    def chunks() -> Iterator[bytes]:
        for index, chunk in enumerate(stream(declare(["x", "int8", [LIMIT + 1]]), b"x")):
            read.append(index)
            yield chunk

    with pytest.raises(MessageError, match="max_message_bytes"):
        decode(chunks(), LIMIT)
    assert read == [0]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    arrays = {"x": np.random.default_rng(3).normal(size=300).astype(np.float32)}
    whole = b"".join(encode(Message({"kind": "push"}, arrays), LIMIT))
    first = len(next(encode(Message({"kind": "push"}, arrays), LIMIT)))
    chunks = [whole[:first], whole[first:]]
    which = data.draw(st.integers(0, 1))
    kind = data.draw(st.sampled_from(["flip", "truncate", "drop", "repeat", "swap"]))
    chunk = bytearray(chunks[which])
    if kind == "flip":
        place = data.draw(st.integers(0, len(chunk) - 1))
        chunk[place] ^= 1 << data.draw(st.integers(0, 7))
        chunks[which] = bytes(chunk)
    elif kind == "truncate":
        chunks[which] = bytes(chunk[: data.draw(st.integers(0, len(chunk) - 1))])
    elif kind == "drop":
        del chunks[which]
    elif kind == "repeat":
        chunks.insert(which, chunks[which])
    else:
        chunks.reverse()
    with pytest.raises(ChecksumError, match=r"[Ss]end .* again"):
        decode(chunks, LIMIT)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4), st.booleans())
def test_random_bytes_raise_nothing_else(bodies: list[bytes], formatted: bool) -> None:
    if formatted:
        bodies = [header({"header": {}, "arrays": [["x", "int4", [2, 3]]]}), *bodies]
    try:
        message = decode(stream(*bodies) if bodies else [], LIMIT)
    except MessageError:
        return
    assert message.arrays["x"].shape == (2, 3)
    np.asarray(message.arrays["x"]).astype(np.int32)  # usable, whatever its bytes are


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message({"x": np.float32(1)}), "Put numbers, texts, lists and dicts into the header"),
        (Message({"x": float("nan")}), "is not JSON"),
        (Message({"x": "a" * CHUNK_BYTES}), "Put large values into arrays"),
        (Message({}, {"x": np.array(["text"])}), "expected a dtype of JAX's arrays"),
        (Message({}, {"x": np.array([None])}), "expected a dtype of JAX's arrays"),
        (Message({}, {"x": np.zeros(LIMIT + 1, np.int8)}), "Send smaller fragments"),
    ],
)
def test_messages_that_cannot_be_sent(message: Message, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        encode(message, LIMIT)


def test_the_limit_is_exact() -> None:
    array = np.random.default_rng(4).normal(size=10)
    assert_same(decode(encode(Message({}, {"x": array}), 80), 80).arrays["x"], array)
    with pytest.raises(
        MessageError, match="have 80 bytes, expected at most max_message_bytes = 79"
    ):
        encode(Message({}, {"x": array}), 79)
    with pytest.raises(MessageError, match="have 80 bytes"):
        decode(encode(Message({}, {"x": array}), 80), 79)


def test_an_array_that_changes_while_it_is_sent_is_noticed_or_sent_whole() -> None:
    array = np.random.default_rng(5).integers(0, 256, 4 * CHUNK_BYTES, np.uint8)
    before = array.copy()
    chunks = encode(Message({}, {"x": array}), LIMIT)
    received = list(itertools.islice(chunks, 2))
    array[: CHUNK_BYTES // 2] += 1  # sent already
    assert_same(decode([*received, *chunks], LIMIT).arrays["x"], before)
