"""Checked casts: a user's numbers in the dtypes that devices hold, where JAX would wrap them."""

import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.errors import ArgumentError, ArgumentTypeError

_CONVERSIONS = {
    "O": "Convert it with .astype(np.float32) or .astype(np.int32), or stack it with np.stack.",
    "M": "Convert it to numbers with .astype('datetime64[s]').astype(np.int64).",
    "m": "Convert it to numbers with .astype('timedelta64[s]').astype(np.int64).",
} | dict.fromkeys("UST", "Number the values with np.unique(values, return_inverse=True)[1].")

# The usual dtypes that JAX holds as they are, in the machine's byte order.
_SAME = frozenset(map(np.dtype, ("bool", "uint8", "int32", "uint32", "float16", "float32")))
_NUMPY = np.ndarray, np.generic
_issubdtype = functools.cache(jnp.issubdtype)  # JAX's takes 10 microseconds


def checked_cast(
    values: ArrayLike, dtype: Any, name: str, remedy: str | None = None
) -> NDArray[Any]:
    """Convert numbers to a dtype, or raise an error that names a value which would change."""
    # Integers and bools stay exact; a float is rounded, and a finite value stays finite.
    array, dtype = _numbers(values, name, remedy), np.dtype(dtype)
    if array.dtype == dtype:
        return array
    is_complex = _issubdtype(array.dtype, jnp.complexfloating)
    if is_complex and not _issubdtype(dtype, jnp.complexfloating):
        raise ArgumentTypeError(
            f"{name} has dtype {array.dtype}, expected real numbers. {remedy or 'Pass x.real.'}"
        )
    if _issubdtype(dtype, jnp.inexact):
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        info = jnp.finfo(dtype)
        changed = _overflows(array, cast, info)
        expected = f"numbers from {info.min} to {info.max}"
    else:
        low, high = (0, 1) if dtype == np.bool_ else _bounds(dtype)
        changed = _outside(array, low, high)
        expected = f"integers from {low} to {high}"
        cast = array if np.any(changed) else array.astype(dtype)
    if np.any(changed):
        raise ArgumentError(
            f"{name} has the value {array[changed].flat[0]} ({array.dtype}), expected {expected} "
            f"({dtype}). {remedy or _wider(array)}"
        )
    return cast


def device_array(values: Any, name: str, remedy: str | None = None) -> NDArray[Any]:
    """Convert NumPy or Python numbers to the dtype in which JAX holds them."""
    if isinstance(values, int) and not -(2**63) <= values < 2**64:
        raise ArgumentError(f"{name} is {values}, expected an integer of at most 64 bits.")
    array = _numbers(values, name, remedy)
    return checked_cast(array, _device_dtype(array.dtype), name, remedy)


def device_weights(values: Any, name: str) -> NDArray[Any]:
    """Convert weights as `device_array`, and integers beyond its bounds to floats."""
    array = _numbers(values, name)
    dtype = _device_dtype(array.dtype)
    if jnp.issubdtype(dtype, jnp.integer) and np.any(_outside(array, *_bounds(dtype))):
        dtype = jax.dtypes.canonicalize_dtype(np.float64)
    return checked_cast(array, dtype, name)


def host_array(values: Any, name: str) -> NDArray[Any]:
    """Convert to an array of any dtype, or raise if values are masked: NumPy drops the mask."""
    if isinstance(values, np.ma.MaskedArray) and np.any(np.ma.getmaskarray(values)):
        raise ArgumentError(
            f"{name} is an array with masked values, expected a value in every place. Fill them "
            "with x.filled(...), or leave them out; in a batch, mark them in a field 'mask'."
        )
    return np.asarray(values)


def real_number(name: str, value: Any) -> float:
    """Return one real number as a float, or raise a TypeError that names the argument."""
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    is_scalar = is_array and value.ndim == 0 and not np.ma.is_masked(value)
    if not isinstance(value, numbers.Real) and not (
        is_scalar and _is_numeric(value.dtype) and jnp.isrealobj(value)
    ):
        raise ArgumentTypeError(
            f"{name} is {value!r:.80}, expected one real number. Pass for example 0.5."
        )
    try:
        return float(value)
    except OverflowError:  # of an integer
        return math.inf if value > 0 else -math.inf


def is_host_number(value: Any) -> bool:
    """Return whether a value is NumPy's or Python's numbers, which JAX converts."""
    if isinstance(value, np.ndarray | np.generic):
        return _is_numeric(value.dtype)
    return isinstance(value, int | float | complex)


def checked_tree(tree: Any, name: str, remedy: str | None = None) -> Any:
    """Check that JAX can hold the NumPy arrays of a pytree without changing a value."""

    def check(path: Any, leaf: Any) -> Any:
        if not needs_cast(leaf):
            return leaf
        array = device_array(leaf, name + jax.tree_util.keystr(path), remedy)
        is_kept = leaf.dtype.isnative and leaf.dtype.char not in "gG"
        return leaf if is_kept and not isinstance(leaf, np.ma.MaskedArray) else array

    if not any_needs_cast(tree):
        return tree
    return jax.tree.map_with_path(check, tree)


def any_needs_cast(tree: Any) -> bool:
    """Return whether `needs_cast` is True for a leaf. Fast, because it runs for every cohort."""
    for leaf in jax.tree.leaves(tree):
        if type(leaf) is np.ndarray:
            if leaf.dtype not in _SAME and needs_cast(leaf):
                return True
        elif isinstance(leaf, _NUMPY) and needs_cast(leaf):
            return True
    return False


def needs_cast(value: Any) -> bool:
    """Return whether JAX would change a NumPy array's dtype, or not take it at all."""
    if not isinstance(value, _NUMPY):
        return False
    dtype = value.dtype
    is_same = _is_numeric(dtype) and dtype.isnative and not isinstance(value, np.ma.MaskedArray)
    return not (is_same and _device_dtype(dtype) == dtype)


def conversion(value: Any) -> str:
    """Return how to convert an array that is not numbers, for messages; empty if unknown."""
    code = getattr(getattr(value, "dtype", None), "kind", "")
    if code == "O" and value.size and isinstance(value.flat[0], str | bytes):
        code = "U"  # as columns of texts are
    return _CONVERSIONS.get(code, "")


def _device_dtype(dtype: Any) -> Any:
    """Return the dtype in which JAX holds numbers of a dtype."""
    doubles = {"g": np.float64, "G": np.complex128}  # of long doubles, which JAX has not
    return jax.dtypes.canonicalize_dtype(doubles.get(dtype.char, dtype))


def _is_numeric(dtype: Any) -> bool:
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    return is_number and dtype.kind != "m"  # to NumPy, a timedelta is a signed integer


def _wider(array: NDArray[Any]) -> str:
    """Return the remedy for numbers that JAX holds in fewer bits than NumPy."""
    is_integer = jnp.issubdtype(array.dtype, jnp.integer)
    other = "Pass floats (.astype(np.float32))" if is_integer else "Scale the numbers"
    return f"{other}, or set jax.config.update('jax_enable_x64', True) when the process starts."


def _numbers(values: Any, name: str, remedy: str | None = None) -> NDArray[Any]:
    """Return values as an array of numbers in the machine's byte order, or raise a TypeError."""
    array = host_array(values, name)
    if not _is_numeric(array.dtype):
        sample = f" and values such as {array.ravel()[:1].tolist()[0]!r:.80}" if array.size else ""
        raise ArgumentTypeError(
            f"{name} has dtype {array.dtype}{sample}, expected numbers. "
            f"{' '.join(filter(None, (conversion(array), remedy)))}"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@functools.cache
def _bounds(dtype: Any) -> tuple[int, int]:
    return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)


def _overflows(array: NDArray[Any], cast: NDArray[Any], info: Any) -> Any:
    """Return where finite numbers have become infinite; False where none can have."""
    if not array.size or array.dtype.kind != "f":  # the least of complex numbers is not a bound
        return np.isfinite(array) & ~np.isfinite(cast)
    least, largest = float(array.min()), float(array.max())  # float16 has no room for the bounds
    if float(info.min) <= least and largest <= float(info.max):  # False for a NaN
        return False
    return np.isfinite(array) & ~np.isfinite(cast)


def _outside(array: NDArray[Any], low: int, high: int) -> Any:
    """Return where numbers are not integers from `low` to `high`; False where none can be."""
    if array.dtype == np.bool_ or not array.size:
        return False
    if _issubdtype(array.dtype, jnp.integer):
        if array.dtype.kind == "V":  # 2 and 4 bits
            array = array.astype(np.int64)
        if low <= int(array.min()) and int(array.max()) <= high:
            return False
        # Bounds beyond the dtype's own cannot be compared with.
        info = np.iinfo(array.dtype)
        return (array < max(low, info.min)) | (array > min(high, info.max))
    wide = array.astype(np.promote_types(array.dtype, np.float64))
    return ~((wide >= low) & (wide < float(high + 1)) & (np.trunc(wide) == wide))
