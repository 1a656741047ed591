"""Checked casts: every value is kept, or an error names it."""

import re

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import fedpax
from fedpax.errors import ArgumentTypeError
from fedpax.primitives.casts import (
    checked_cast,
    checked_tree,
    device_array,
    device_weights,
    real_number,
)

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "longdouble"]
ORDERS = [">", "<"]


def arrays_of(dtype: np.dtype) -> st.SearchStrategy[np.ndarray]:
    """Arrays with the values where casts go wrong: bounds, neighbours of bounds, fractions."""
    powers = [
        s * 2.0**b + d for b in (7, 8, 15, 16, 24, 31, 32, 63) for s in (1, -1) for d in (-1, 0, 1)
    ]
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            edges = [int(p) for p in powers if info.min <= int(p) <= info.max]
            elements = st.sampled_from([info.min, info.max, *edges]) | st.integers(
                info.min, info.max
            )
        else:
            values = [*powers, 0.5, -0.25, np.nan, np.inf, -np.inf, 1e300, -0.0]
            elements = st.sampled_from([float(dtype.type(v)) for v in values])
    return hnp.arrays(dtype, st.integers(0, 4), elements=elements)


@given(
    st.sampled_from(
        [np.dtype(d).newbyteorder(o) for d in INTEGERS + FLOATS[:3] for o in ORDERS]
    ).flatmap(arrays_of),
    st.sampled_from([*INTEGERS, "bool"]),
)
def test_a_cast_to_integers_keeps_every_value_or_raises(array, target):
    low, high = (0, 1) if target == "bool" else (np.iinfo(target).min, np.iinfo(target).max)
    fits = all(np.isfinite(v) and int(v) == v and low <= int(v) <= high for v in array.tolist())
    if not fits:
        with pytest.raises(ValueError, match=r"^labels has the value .*, expected integers from"):
            checked_cast(array, target, "labels")
        return
    cast = checked_cast(array, target, "labels")
    assert cast.dtype == target and cast.tolist() == array.tolist()


@given(
    st.sampled_from([np.dtype(d) for d in INTEGERS + FLOATS[:3]]).flatmap(arrays_of),
    st.sampled_from(["float16", "float32", "float64", ml_dtypes.bfloat16]),
)
def test_a_cast_to_floats_rounds_and_keeps_finite_values_finite(array, target):
    info = ml_dtypes.finfo(target)
    with np.errstate(over="ignore"):
        rounded = array.astype(target)
    if np.any(np.isfinite(array) & ~np.isfinite(rounded)):
        with pytest.raises(ValueError, match=r"^x has the value .*, expected numbers from"):
            checked_cast(array, target, "x")
        return
    cast = checked_cast(array, target, "x").astype(np.float64)
    finite = np.isfinite(array.astype(np.float64))
    np.testing.assert_allclose(
        cast[finite], array[finite].astype(np.float64), rtol=float(info.eps), atol=float(info.tiny)
    )
    np.testing.assert_array_equal(cast[~finite], array[~finite].astype(np.float64))


def test_floats_of_few_bits_become_integers_exactly():
    small = np.array([3, 5], ml_dtypes.bfloat16)
    assert checked_cast(small, np.int32, "x").tolist() == [3, 5]
    assert checked_cast(np.array([-8, 7]), ml_dtypes.int4, "x").astype(int).tolist() == [-8, 7]
    with pytest.raises(ValueError, match=r"value 8 \(int64\), expected integers from -8 to 7"):
        checked_cast(np.array([8]), ml_dtypes.int4, "x")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array(["a", "b"]), r"dtype <U1 and values such as .*np.unique"),
        (np.array(["a", None], object), r"dtype object and values such as 'a'.*np.unique"),
        (np.array([1, None]), r"dtype object and values such as 1, .*\.astype\(np.float32\)"),
        (np.array(["2020-01-01"], "M8[D]"), r"dtype datetime64\[D\].*\.astype\(np.int64\)"),
        (np.array([1], "m8[s]"), r"dtype timedelta64\[s\].*\.astype\(np.int64\)"),
        (np.array([1j]), r"dtype complex128, expected real numbers. Pass x.real."),
    ],
)
def test_what_is_not_numbers_names_its_dtype_and_the_conversion(values, words):
    with pytest.raises(TypeError, match=words):
        checked_cast(values, np.float32, "x")


def test_numbers_that_jax_would_wrap_raise_unless_jax_has_64_bits():
    large = np.array([2**40, 1])
    with pytest.raises(ValueError, match=r"ids has the value 1099511627776 \(int64\).*enable_x64"):
        device_array(large, "ids")
    with pytest.raises(ValueError, match=rf"n is {2**70}, expected an integer of at most 64 bits"):
        device_array(2**70, "n")
    with pytest.raises(ValueError, match=r"tree\['a'\]\[0\] has the value -2147483649"):
        checked_tree({"a": [np.array([-(2**31) - 1])], "b": "text"}, "tree")
    assert device_weights(large, "w").tolist() == [2.0**40, 1.0]
    with jax.enable_x64(True):
        assert device_array(large, "ids") is large


def test_long_doubles_and_masked_arrays_are_kept_or_named():
    assert device_array(np.ones(2, np.longdouble), "x").dtype == np.float32
    assert checked_tree(np.ones(2, np.clongdouble), "x").dtype == np.complex64
    hidden = np.ma.array([1.0, 2.0], mask=[False, True])
    for check in (device_array, checked_tree, device_weights):
        with pytest.raises(ValueError, match=r"x is an array with masked values.*filled"):
            check(hidden, "x")
    shown = checked_tree(np.ma.array([1.0, 2.0], np.float32), "x")
    assert type(shown) is np.ndarray and shown.tolist() == [1.0, 2.0]


# ---- where a user's numbers enter a program

average = fedpax.program(clients=3)(lambda x, w: fedpax.federated_mean(x, weights=w))
VALUES, COUNTS = np.array([2.0, 12.0, 12.0]), np.array([3e9, 1e9, 1e9])


@pytest.mark.parametrize("dtype", ["uint32", "float32", "float64", ">f8", ">u4"])
def test_weights_that_jax_can_hold_are_used_as_they_are(dtype):
    assert average(VALUES, COUNTS.astype(dtype)).item() == 6.0


def test_weights_within_a_program_may_be_larger_than_int32():
    run = fedpax.program(clients=3)(
        lambda x: fedpax.federated_mean(x, weights=COUNTS.astype(np.int64))
    )
    assert run(VALUES).item() == jax.jit(run)(VALUES).item() == 6.0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (COUNTS.astype(np.int64), r"argument w has the value 3000000000 \(int64\)"),
        (np.array([1, 2, 2**63], np.uint64), r"argument w has the value 9223372036854775808"),
        (np.array([1e300, 1, 1]), r"argument w has the value 1e\+300 \(float64\)"),
        ([1, 2, 2**40], r"argument w\[2\] has the value 1099511627776"),
        (np.ma.array([1, 2, 3], mask=[0, 1, 0]), "argument w is an array with masked values"),
    ],
)
def test_an_argument_that_jax_would_change_is_named(value, words):
    with pytest.raises(ValueError, match=words):
        average(VALUES, value)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "broadcast", "map"])
def test_a_constant_of_a_program_that_jax_would_change_is_named(name):
    large = np.array([2**40, 1, 1])
    call = {"map": lambda x: fedpax.federated_map(jnp.negative, {"a": x})}.get(
        name, lambda x: getattr(fedpax, f"federated_{name}")({"a": x})
    )
    message = re.escape(f"federated_{name}(): ") + r".*\['a'\] has the value 1099511627776"
    with pytest.raises(ValueError, match=message):
        fedpax.program(clients=3)(lambda x: call(large))(VALUES)


def test_strings_name_their_conversion():
    text = np.array(["a", "b", "c"], np.dtypes.StringDType())
    with pytest.raises(TypeError, match=r"argument w .*StringDType.*np\.unique"):
        average(VALUES, text)
    with pytest.raises(TypeError, match=r"x .*StringDType.*np\.unique"):
        fedpax.program(clients=3)(lambda x: fedpax.federated_sum(text))(VALUES)


def test_a_real_number_is_a_float_or_told():
    assert real_number("alpha", np.float32(0.5)) == 0.5
    words = r"alpha is \(1\+2j\), expected one real number. Pass for"
    with pytest.raises(ArgumentTypeError, match=words):
        real_number("alpha", 1 + 2j)
