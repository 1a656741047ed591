"""Arrays by name survive their encoding bit by bit; damaged bytes are told."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from fedpax.deploy.encoded_values import decode_values, encode_values

DTYPES = ["float32", "float16", "int8", "uint32", "bool", "int64", "float64", "complex64"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st_numpy.arrays(dtype, st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0))
)


@given(st.dictionaries(st.text(), arrays, max_size=4))
def test_arrays_survive(values):
    content = encode_values(values)
    result = decode_values(content)
    assert list(result) == list(values)
    for name, value in values.items():
        assert (result[name].dtype, result[name].shape) == (value.dtype, value.shape)
        assert result[name].tobytes() == value.tobytes()
    assert encode_values(result) == content


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ml_dtypes.float8_e4m3fn, jnp.int4])
def test_dtypes_of_jax_survive(dtype):
    value = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)) * 3, dtype)
    (result,) = decode_values(encode_values({"x": value})).values()
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.astype(np.float32), value.astype(np.float32))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_survive(impl):
    keys = jax.random.split(jax.random.key(7, impl=impl), (2, 3))
    (result,) = decode_values(encode_values({"x": keys})).values()
    assert result.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(result), jax.random.key_data(keys))


@given(st.integers(0, 10_000), st.data())
def test_cut_bytes_are_told(seed, data):
    value = np.random.default_rng(seed).normal(size=(4, 3))
    content = encode_values({"x": value, "y": value[0]})
    end = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(ValueError, match="damaged"):
        decode_values(content[:end])
    with pytest.raises(ValueError, match="damaged"):
        decode_values(content + b"\0")
