"""to_numpy and array_to_arrow: columns between Arrow and NumPy, masked where values are missing."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64
from numpy.typing import NDArray

from fedpax.errors import ArgumentError


def numpy_dtype(data_type: pa.DataType) -> np.dtype[Any]:
    """Return NumPy's dtype of numbers; `to_pandas_dtype` of some versions needs pandas."""
    return np.dtype(pa.array([], data_type).to_numpy(zero_copy_only=False).dtype)


def to_numpy(column: Any, *, masked: bool = False) -> NDArray[Any]:
    """Convert a column to NumPy, without a copy if it is numbers in one piece."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # texts of more than 2 GB
        parts = [to_numpy(chunk) for chunk in column.chunks]
        masked = masked or bool(column.null_count)
        together: NDArray[Any] = (np.ma.concatenate if masked else np.concatenate)(parts)
        return together
    if isinstance(column.type, pa.DictionaryType):
        column = column.dictionary_decode()
    if not column.null_count:
        return np.ma.MaskedArray(_plain(column)) if masked else _plain(column)
    mask = np.asarray(column.is_null().to_numpy(zero_copy_only=False))
    if column.null_count == len(column) and not is_scalar(column.type):
        text = not (pa.types.is_primitive(column.type) or pa.types.is_null(column.type))
        empty = np.full(len(column), None, object) if text else np.full(len(column), np.nan)
        return np.ma.MaskedArray(empty, mask=mask)
    values = _plain(_fill(column))
    if values.ndim > 1:
        mask = np.broadcast_to(mask.reshape(-1, *[1] * (values.ndim - 1)), values.shape)
    return np.ma.MaskedArray(values, mask=mask)


def encode_values(column: pa.ChunkedArray) -> tuple[pa.Array, Int64[np.ndarray, " n"]]:
    """Return the distinct values, ascending with null last, and the place of each value there."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    chunks = column.dictionary_encode("encode").chunks  # all have the whole dictionary
    values = chunks[0].dictionary if chunks else pa.array([], column.type)
    order = pc.array_sort_indices(values)
    places = np.concatenate([np.zeros(0, np.int64), *(chunk.indices for chunk in chunks)])
    return values.take(order), np.argsort(order)[places]


def array_to_arrow(array: NDArray[Any]) -> Any:
    """Convert an array `[examples, ...]`, such as a tensor; small floats become float32."""
    if array.ndim == 0:
        raise ArgumentError("an array has no axis, expected one entry for each example")
    if 0 in array.shape[1:]:
        raise ArgumentError(
            f"an array has shape {list(array.shape)}, expected at least one number in each example"
        )
    array = _native(array)
    try:
        values = pa.array(np.ascontiguousarray(array).reshape(-1))
    except (pa.ArrowException, TypeError) as error:
        raise ArgumentError(
            f"an array has dtype {array.dtype}, expected numbers, texts or dates. "
            f"{_REMEDIES.get(array.dtype.kind, 'Give every example a value of one type')} ({error})"
        ) from error
    if array.ndim == 1:
        return values
    shape = array.shape[1:]
    storage = pa.FixedSizeListArray.from_arrays(values, int(np.prod(shape)))
    tensor = pa.fixed_shape_tensor(values.type, shape)
    return pa.ExtensionArray.from_storage(tensor, storage)


_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def plain_types(table: pa.Table) -> pa.Table:
    """Give texts and tensors the types that all functions of Arrow take."""
    kinds = [field.with_type(_VIEWS.get(field.type, field.type)) for field in table.schema]
    return _plain_tensors(table.cast(pa.schema(kinds, table.schema.metadata)))


def _plain_tensors(table: pa.Table) -> pa.Table:
    """Remove from tensors the permutation of axes that pyarrow writes for arrays."""
    for place, field in enumerate(table.schema):
        data_type = field.type
        if isinstance(data_type, pa.FixedShapeTensorType):
            order = data_type.permutation
            if order is not None or data_type.dim_names is not None:
                in_order = order is None or order == sorted(order)
                convert = _same_axes if in_order else _permute_axes
                empty = pa.array([], data_type.storage_type)
                chunks = table.column(place).chunks or [
                    pa.ExtensionArray.from_storage(data_type, empty)
                ]
                table = table.set_column(place, field.name, pa.chunked_array(map(convert, chunks)))
    return table


def _same_axes(tensors: Any) -> Any:
    data_type = tensors.type
    return pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(data_type.value_type, data_type.shape), tensors.storage
    )


def _permute_axes(tensors: Any) -> Any:
    data_type = tensors.type
    shape = [data_type.shape[axis] for axis in data_type.permutation]
    flat = (
        np.arange(int(np.prod(shape)))
        .reshape(data_type.shape)
        .transpose(data_type.permutation)
        .reshape(-1)
    )
    storage = tensors.storage
    size = storage.type.list_size
    places = size * np.arange(len(storage))[:, None] + flat
    values = storage.values.slice(storage.offset * size).take(pa.array(places.reshape(-1)))
    mask = storage.is_null() if storage.null_count else None
    return pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(data_type.value_type, shape),
        pa.FixedSizeListArray.from_arrays(values, size, mask=mask),
    )


_REMEDIES = {
    "c": "Give its real and its imaginary part as two columns, x.real and x.imag",
    "f": "Convert it with .astype(np.float64)",
    "V": "Give a column for each of its fields, or convert it to numbers",
}


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Return the same values in the machine's byte order, and in dtypes that Arrow has."""
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "V" and array.dtype.names is None:
        for wide in (np.int32, np.float32):  # of bfloat16, int4 and others
            if np.can_cast(array.dtype, wide):
                return array.astype(wide)
    return array


def concatenate_values(values: Sequence[Any]) -> Any:
    """Convert values of JSON: lists of numbers of one shape are a tensor."""
    if values and isinstance(values[0], list):
        try:
            array = np.asarray(values)
        except ValueError:  # lists of different lengths
            return pa.array(values)
        if array.dtype.kind in "iufb":
            return array_to_arrow(array)
    return json_values(values)


def json_values(values: Sequence[Any]) -> Any:
    """Convert values of examples, as JSON has them, integers beyond int64 to uint64."""
    try:
        return pa.array(values)
    except OverflowError:
        try:
            return pa.array(values, pa.uint64())
        except (OverflowError, pa.ArrowException) as error:
            raise ArgumentError(
                "it has integers beyond int64, expected all of a column's within uint64. Write "
                "them as texts"
            ) from error


def _plain(array: Any) -> NDArray[Any]:
    data_type = array.type
    if isinstance(array, pa.FixedShapeTensorArray):
        # pyarrow refuses booleans, texts and dates
        if not is_integer_or_float(data_type.value_type):
            return _plain(array.storage.flatten()).reshape(len(array), *data_type.shape)
        tensor: NDArray[Any] = array.to_numpy_ndarray()
        return tensor
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if pa.types.is_fixed_size_list(data_type) and not array.flatten().null_count:
        inner = _plain(array.flatten())
        return inner.reshape(len(array), data_type.list_size, *inner.shape[1:])
    if _is_list_of_numbers(data_type) and not array.values.null_count:
        values, offsets = array.values.to_numpy(zero_copy_only=False), array.offsets.to_numpy()
        return _object_array([values[a:b] for a, b in itertools.pairwise(offsets)])
    if pa.types.is_nested(data_type):
        return _object_array([_nested(value) for value in array.to_pylist()])
    if pa.types.is_interval(data_type):  # `to_numpy` of PyArrow 26 crashes
        return _object_array(array.to_pylist())
    if data_type == pa.time64("ns"):  # Python's times have microseconds
        array = array.view(pa.duration("ns"))
    plain: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return plain


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and is_integer_or_float(kind.value_type))


def are_images(kind: pa.DataType) -> bool:
    """Return whether a type is pixels, uint8 `[height, width, channels]`."""
    is_tensor = isinstance(kind, pa.FixedShapeTensorType) and kind.value_type == pa.uint8()
    return bool(is_tensor and len(kind.shape) == 3 and kind.shape[2] in (1, 3))


def is_integer_or_float(kind: pa.DataType) -> bool:
    """Return whether a type is integers or floats."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_scalar(kind: pa.DataType) -> bool:
    """Return whether NumPy has the values of a type: numbers, booleans, dates and durations."""
    is_instant = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    is_duration = pa.types.is_duration(kind)
    return bool(is_integer_or_float(kind) or pa.types.is_boolean(kind) or is_instant or is_duration)


def check_client_type(kind: pa.DataType, client: str, name: str) -> None:
    """Raise an error for a column of clients that has lists or structs."""
    is_tensor = isinstance(kind, pa.BaseExtensionType)
    is_nested = pa.types.is_nested(kind) or is_tensor
    if is_nested or pa.types.is_float16(kind) or pa.types.is_decimal256(kind):
        raise ArgumentError(
            f"The column {client!r} of {name} has values of type {kind}, expected texts or "
            "numbers that name a client, which can be sorted. Convert it, such as by "
            f"types={{{client!r}: 'string'}} (--types={client}=string)."
        )


def check_client_numbers(column: Any, client: str, name: str) -> None:
    """Raise if floats hold several integers, which parsers do to integers beyond int64."""
    if not pa.types.is_floating(column.type):
        return
    largest = np.abs(to_numpy(pc.drop_null(column)).astype(np.float64))
    bound = 2.0 ** np.finfo(numpy_dtype(column.type)).nmant
    if (beyond := largest[np.isfinite(largest)] > 2 * bound).any():
        number = largest[np.isfinite(largest)][beyond][0]
        raise ArgumentError(
            f"The column {client!r} of {name} has the client {number:.0f} as {column.type}, which "
            f"holds integers up to {2 * bound:.0f}: larger numbers of different clients would be "
            f"equal. Set types={{{client!r}: 'uint64'}} (--types={client}=uint64), or 'string' for "
            "longer numbers of CSV."
        )


def join_zeros(table: pa.Table, client: str) -> pa.Table:
    """Replace -0.0 by 0.0, the same number, in a column of clients."""
    column = table.column(client)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if kind not in (pa.float32(), pa.float64()):
        return table
    place, zero = table.column_names.index(client), pa.scalar(0.0, kind)
    return table.set_column(place, client, pc.add(column.cast(kind), zero))


def _object_array(values: Sequence[Any]) -> NDArray[Any]:
    objects = np.empty(len(values), object)
    objects[:] = values
    return objects


def _nested(value: Any) -> Any:
    """Return a list of numbers or texts as an array; any other value as it is."""
    if not isinstance(value, list):
        return value
    kinds = {type(v) for v in value}
    is_flat = kinds <= {str} or kinds <= {bool} or kinds <= {int, float}
    return np.asarray(value) if is_flat else value


def _fill(array: Any) -> Any:
    """Replace nulls by values that the mask hides: NaN, 0 or False, else the first value."""
    if is_scalar(array.type):
        is_boolean, is_float = pa.types.is_boolean(array.type), pa.types.is_floating(array.type)
        hidden = np.nan if is_float else False if is_boolean else 0
        return pc.fill_null(array, pa.scalar(hidden, array.type))
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    return array.take(np.where(valid, np.arange(len(array)), np.argmax(valid)))


def is_pandas_index(name: str) -> bool:
    """Tell whether a column is the unnamed index of pandas."""
    return re.fullmatch(r"__index_level_\d+__", name) is not None
