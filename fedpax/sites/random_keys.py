"""Random keys in messages: arrays of numbers, as `jax.random.key_data` has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ArrayType = tuple[tuple[int, ...], np.dtype]


def is_key(dtype: Any) -> bool:
    """Return whether values of a dtype are random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def to_numbers(x: Any) -> np.ndarray:
    """Return an array for a message."""
    return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else x)


def type_in_message(shape: tuple[int, ...], dtype: Any) -> ArrayType:
    """Return the shape and the dtype in a message of a value."""
    if not is_key(dtype):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


def from_numbers(x: Any, dtype: Any) -> jax.Array:
    """Return the value of an array of a message, whose dtype here is given."""
    if not is_key(dtype):
        return jnp.asarray(x)
    names: list[Any] = []
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: names.append(jax.random.key_impl(key)), key)
    return jax.random.wrap_key_data(jnp.asarray(x), impl=names[0])
