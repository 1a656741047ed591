"""Arrays by name as bytes: the messages of engines, and states in files.

Nothing is unpickled.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LENGTH = 8
_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def key_implementation(dtype: str) -> str:
    """Return the implementation of a dtype of random keys, such as "key<fry>"."""
    return {str(jax.random.key(0, impl=name).dtype): name for name in _KEYS}[dtype]


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Encode arrays by name: the length of a JSON header, the header, and the arrays."""
    header, arrays = [], []
    for name, value in values.items():
        dtype: Any = getattr(value, "dtype", None)
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value)
        dtype_name = f"key<{jax.random.key_impl(value)}>" if is_key else str(array.dtype)
        header.append([name, dtype_name, array.shape])
        arrays.append(array.tobytes())
    described = json.dumps(header).encode()
    return b"".join([len(described).to_bytes(_LENGTH, "little"), described, *arrays])


def encode_list(values: Iterable[Any]) -> bytes:
    """Encode arrays in their order."""
    return encode_values({str(i): value for i, value in enumerate(values)})


def decode_list(content: bytes) -> list[Any]:
    """Decode what `encode_list` returned."""
    return list(decode_values(content).values())


def numbers_of(value: Any) -> np.ndarray:
    """Return an array, or the numbers of random keys."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def decode_values(content: bytes) -> dict[str, Any]:
    """Decode `encode_values`: read-only NumPy arrays by name, and random keys as JAX arrays."""
    start = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    values: dict[str, Any] = {}
    try:
        for name, dtype_name, shape in json.loads(content[_LENGTH:start]):
            is_key = dtype_name.startswith("key<")
            dtype = np.dtype(np.uint32) if is_key else jnp.dtype(dtype_name)
            count = math.prod(shape)
            array = np.frombuffer(content, dtype, count, start).reshape(shape)
            start += array.nbytes
            values[name] = (
                jax.random.wrap_key_data(jnp.asarray(array), impl=dtype_name[4:-1])
                if is_key
                else array
            )
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"decode_values(): {len(content)} bytes are damaged ({error}), expected bytes from "
            "encode_values(). Send or write them again."
        ) from error
    if start != len(content):
        raise ValueError(
            f"decode_values(): {len(content)} bytes are damaged, expected {start}. Send or write "
            "them again."
        )
    return values
