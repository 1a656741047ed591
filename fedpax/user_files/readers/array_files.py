"""read_npz and read_hdf5: arrays of NumPy and HDF5, and TensorFlow Federated's group a client."""

import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedpax.errors import ArgumentError
from fedpax.user_files.arrow_numpy import array_to_arrow
from fedpax.user_files.finding import DataFile
from fedpax.user_files.formats import ReadOptions
from fedpax.user_files.read_table import add_clients

_TFF_ROOT = "examples"


def read_npz(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read a column from each array `[examples, ...]` of an .npz; objects are refused."""
    try:
        with file.open_seekable() as opened, np.load(opened, allow_pickle=False) as arrays:
            names = options.columns or arrays.files
            return _to_table({name: arrays[name] for name in names if name in arrays.files})
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ArgumentError(str(error)) from error


def read_hdf5(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read HDF5: data sets are columns, and a group of them, also in `examples`, is a client."""
    import h5py

    with file.open_seekable() as opened, h5py.File(opened, "r") as root:
        groups = root[_TFF_ROOT] if isinstance(root.get(_TFF_ROOT), h5py.Group) else root
        if all(isinstance(value, h5py.Dataset) for value in groups.values()):
            return _to_table(_read_group(groups, options))
        tables = []
        for name, group in groups.items():
            if not isinstance(group, h5py.Group):
                raise ArgumentError(f"it has groups and the array {name!r} beside them")
            table = _to_table(_read_group(group, options))
            tables.append(add_clients(table, [name] * table.num_rows))
        return pa.concat_tables(tables)


def _read_group(group: Any, options: ReadOptions) -> dict[str, NDArray[Any]]:
    import h5py

    arrays: dict[str, NDArray[Any]] = {}
    for name, values in group.items():
        if not isinstance(values, h5py.Dataset):
            raise ArgumentError(f"its group {group.name!r} has the group {name!r}, expected arrays")
        if values.external or values.is_virtual:  # any file of this machine could be named
            raise ArgumentError(
                f"its array {name!r} is stored in another file, expected it in this one. Copy the "
                "data with h5repack"
            )
        if not options.columns or name in options.columns:
            is_text = h5py.check_string_dtype(values.dtype) is not None
            # As UTF-8, which TensorFlow Federated writes as bytes without an encoding.
            arrays[name] = values.asstr("utf-8")[:] if is_text else values[:]
    return arrays


def _to_table(arrays: Mapping[str, NDArray[Any]]) -> pa.Table:
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ArgumentError(f"its arrays have {lengths} examples, expected one number")
    columns = {}
    for name, array in arrays.items():
        try:
            columns[name] = array_to_arrow(array)
        except ArgumentError as error:
            raise ArgumentError(f"{name!r}: {error}") from error
    return pa.table(columns)
