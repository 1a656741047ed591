"""Messages between a syncer and its islands: a JSON header, arrays by name, and their encoding."""

import json
import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from fedpax.errors import ArgumentError, FedpaxError
from fedpax.files import check_nesting
from fedpax.secure_sums.message import Message as Message

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk's body, at most. A header, with the arrays' names and shapes, fits into one."""

CHECKSUM_BYTES = 4
"""Bytes in front of each chunk's body."""

_FORMAT = b"fedpax message 1\n"
_MAX_DIMENSIONS = 32
_DTYPES = {
    np.dtype(dtype).name: np.dtype(dtype)
    for dtype in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
        *(ml_dtypes.int1, ml_dtypes.int2, ml_dtypes.int4),
        *(ml_dtypes.uint1, ml_dtypes.uint2, ml_dtypes.uint4),
        *(ml_dtypes.bfloat16, ml_dtypes.float4_e2m1fn),
        *(ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn),
        *(ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2),
        *(ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu),
    )
}


class MessageError(FedpaxError, ValueError):
    """A message that does not conform to the format; the text names the difference."""


class ChecksumError(MessageError):
    """A message that was damaged or truncated during the transfer. Send it again."""


def encode(message: Message, max_bytes: int) -> Iterator[bytes]:
    """Encode a message as chunks; all errors are raised here, not by the iterator."""
    # The first chunk is a line that names the format, and JSON: the header, and name, dtype and
    # shape of each array. The next chunks are the arrays' bytes, little-endian, row after row,
    # without padding. A chunk is the CRC-32 of all bodies so far, 4 bytes, which covers their order
    # too, and a body: `CHUNK_BYTES` bytes, or fewer in the first and the last chunk. The iterator
    # copies a chunk at a time: do not write to the arrays before it ends.
    arrays = {name: _native(name, array) for name, array in message.arrays.items()}
    declared = [[name, array.dtype.name, array.shape] for name, array in arrays.items()]
    try:
        content = {"header": dict(message.header), "arrays": declared}
        header = _FORMAT + json.dumps(content, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(
            f"header = {str(message.header)[:200]} is not JSON: {error}. Put numbers, texts, lists "
            "and dicts into the header, and everything else into arrays."
        ) from None
    if len(header) > CHUNK_BYTES:
        raise MessageError(
            f"header and names of {len(arrays)} arrays have {len(header)} bytes, expected at most "
            f"{CHUNK_BYTES}. Put large values into arrays, or send fewer arrays at once."
        )
    _check_size(sum(array.nbytes for array in arrays.values()), max_bytes)
    return _chunks(header, arrays.values())


def decode(chunks: Iterable[bytes], max_bytes: int) -> Message:
    """Decode a message from the chunks of an untrusted sender."""
    # Declared dtypes and shapes are checked before memory for them is allocated.
    bodies = _checked_bodies(chunks)
    header, arrays = _read_header(next(bodies, None), max_bytes)
    memory = [array.reshape(-1).view(np.uint8) for array in arrays.values() if array.size]
    total, received = sum(len(part) for part in memory), 0
    part, filled = 0, 0
    for body in bodies:
        # A peer cannot send bytes one by one, each with a checksum.
        if not len(body) or len(body) != min(CHUNK_BYTES, total - received):
            raise MessageError(
                f"the message has a chunk of {len(body)} bytes after {received} of {total} bytes, "
                f"expected chunks of {CHUNK_BYTES} bytes and the rest. {_SAME_VERSION}"
            )
        received += len(body)
        while len(body):
            step = min(len(body), len(memory[part]) - filled)
            memory[part][filled : filled + step] = np.frombuffer(body[:step], np.uint8)
            body, filled = body[step:], filled + step
            if filled == len(memory[part]):
                part, filled = part + 1, 0
    if received < total:
        raise ChecksumError(f"the message ends after {received} of {total} bytes. Send it again.")
    for name, array in arrays.items():
        if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
            raise MessageError(
                f"array {name!r} of dtype bool has bytes other than 0 and 1. {_SAME_VERSION}"
            )
    return Message(header, arrays)


_SAME_VERSION = "Send messages with the same version of fedpax on both sides."


def _native(name: str, array: np.ndarray) -> np.ndarray:
    array = np.asarray(array, order="C")
    dtype = array.dtype.newbyteorder("=")
    if _DTYPES.get(dtype.name) != dtype:
        raise MessageError(
            f"array {name!r} has dtype {array.dtype}, expected a dtype of JAX's arrays. Convert "
            "it, and send random keys as jax.random.key_data(key)."
        )
    return array.astype(dtype, copy=False)


def _chunks(header: bytes, arrays: Iterable[np.ndarray]) -> Iterator[bytes]:
    checksum = 0

    def chunk(parts: list[Any]) -> bytes:
        nonlocal checksum
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        return b"".join([checksum.to_bytes(CHECKSUM_BYTES, "little"), *parts])

    yield chunk([header])
    parts: list[np.ndarray] = []  # small arrays share a chunk
    room = CHUNK_BYTES
    for array in arrays:
        rest = array.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
        while len(rest):
            parts.append(rest[:room])
            rest, room = rest[room:], room - len(parts[-1])
            if not room:
                yield chunk(parts)
                parts, room = [], CHUNK_BYTES
    if parts:
        yield chunk(parts)


def _checked_bodies(chunks: Iterable[bytes]) -> Iterator[memoryview]:
    checksum = 0
    for index, chunk in enumerate(chunks):
        if len(chunk) > CHECKSUM_BYTES + CHUNK_BYTES:
            raise MessageError(
                f"chunk {index} has {len(chunk)} bytes, expected at most "
                f"{CHECKSUM_BYTES + CHUNK_BYTES}. {_SAME_VERSION}"
            )
        body = memoryview(chunk)[CHECKSUM_BYTES:]
        checksum = zlib.crc32(body, checksum)
        if checksum.to_bytes(CHECKSUM_BYTES, "little") != chunk[:CHECKSUM_BYTES]:
            raise ChecksumError(
                f"chunk {index} of the message does not have its checksum: it was damaged on its "
                "way, or is missing, repeated or out of order. Send the message again."
            )
        yield body


def _read_header(
    body: memoryview | None, max_bytes: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Check a header, and only then allocate its arrays."""
    if body is None:
        raise ChecksumError("the message ends before its header. Send it again.")
    if body[: len(_FORMAT)] != _FORMAT:
        raise MessageError(
            f"the message begins with {bytes(body[: len(_FORMAT)])!r}, expected {_FORMAT!r}. "
            f"{_SAME_VERSION}"
        )
    try:
        content = json.loads(bytes(body[len(_FORMAT) :]), parse_constant=_raise_not_json)
        check_nesting(content)
    except (ValueError, RecursionError) as error:
        raise MessageError(
            f"the message's header is not JSON: {str(error)[:200]}. {_SAME_VERSION}"
        ) from None
    match content:
        case {"header": dict() as header, "arrays": list() as declared, **rest} if not rest:
            pass
        case _:
            raise MessageError(
                f"the message's header holds {str(content)[:200]}, expected a dict with `header` "
                f"and `arrays`. {_SAME_VERSION}"
            )
    specs: dict[str, tuple[list[int], np.dtype]] = {}
    for entry in declared:
        match entry:
            case [str() as name, str() as dtype, list() as shape] if (
                name not in specs
                and dtype in _DTYPES
                and len(shape) <= _MAX_DIMENSIONS
                and all(type(size) is int and size >= 0 for size in shape)
            ):
                # Sizes of empty arrays are bounded too: NumPy fails on [0, 2**70].
                _check_size(_DTYPES[dtype].itemsize * math.prod(filter(None, shape)), max_bytes)
                specs[name] = shape, _DTYPES[dtype]
            case _:
                raise MessageError(
                    f"the message declares an array {str(entry)[:200]}, expected a new name, a "
                    f"dtype of JAX's arrays, and a shape of at most {_MAX_DIMENSIONS} sizes >= 0. "
                    f"{_SAME_VERSION}"
                )
    _check_size(
        sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values()), max_bytes
    )
    return header, {name: np.empty(shape, dtype) for name, (shape, dtype) in specs.items()}


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        # Python raises when it prints more than 4300 digits.
        shown = size if size < 1 << 63 else "more than 2**63"
        raise MessageError(
            f"the arrays of the message have {shown} bytes, expected at most max_message_bytes = "
            f"{max_bytes}. Send smaller fragments, or raise max_message_bytes on both sides."
        )


def _raise_not_json(constant: str) -> Any:
    raise ArgumentError(f"{constant} is not JSON")
