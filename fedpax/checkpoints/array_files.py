"""Parameters of any model as one file of named arrays: `.npz` of NumPy, or safetensors."""

import zipfile
from pathlib import Path

import jax
import numpy as np

from fedpax.algorithm import Params
from fedpax.errors import ArgumentError


def named_arrays(params: Params) -> dict[str, np.ndarray]:
    """Name the leaves of a pytree by their paths.

    Args:
        params: a pytree of arrays.

    Returns:
        The leaves as NumPy arrays, by the keys, fields and indices on the way to each, joined by
        dots. A pytree that is one array is named `params`.

    Raises:
        ValueError: two leaves have the same name, or a leaf is no array of numbers.

    Example:
        >>> named_arrays({"dense": [{"kernel": np.ones((2, 3))}], "scale": np.ones(2)}).keys()
        dict_keys(['dense.0.kernel', 'scale'])
    """
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "params"
        if name in arrays:
            raise ArgumentError(
                f"two parameters are named {name!r}, expected different names. Rename the keys "
                "that have dots."
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) or leaf.dtype == np.object_:
            raise ArgumentError(
                f"{name} has dtype {leaf.dtype}, expected numbers. Leave it out of the parameters."
            )
        arrays[name] = np.asarray(leaf, order="C")
    return arrays


def write_npz(path: Path, params: Params) -> None:
    """Write parameters as a file that `numpy.load` reads.

    Args:
        path: the file.
        params: a pytree of arrays.

    Raises:
        ValueError: as of `named_arrays`; or NumPy has no dtype of a parameter, such as bfloat16.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.npz"
        >>> write_npz(path, {"dense": {"kernel": np.ones((2, 3))}})
        >>> np.load(path)["dense.kernel"].shape
        (2, 3)
    """
    arrays = named_arrays(params)
    for name, array in arrays.items():
        if array.dtype.isbuiltin != 1:
            raise ArgumentError(
                f"{name} has dtype {array.dtype}, which a .npz file cannot hold. Cast with "
                "--dtype=float32, or write --out=NAME.safetensors."
            )
    with zipfile.ZipFile(path, "w") as archive:  # numpy.savez has no array named "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def write_safetensors(path: Path, params: Params) -> None:
    """Write parameters as a safetensors file.

    Args:
        path: the file.
        params: a pytree of arrays.

    Raises:
        ValueError: as of `named_arrays`; or the format has no dtype of a parameter.
        ImportError: the package safetensors is not installed.
    """
    from fedpax.models.huggingface.reading import safetensors

    library, arrays = safetensors("safetensors.numpy"), named_arrays(params)
    path.touch()  # with the usual mode: safetensors makes a file that its owner alone can read
    mode = path.stat().st_mode
    try:
        library.save_file(arrays, path)
    except safetensors("safetensors").SafetensorError as error:
        raise ArgumentError(f"the format cannot hold a parameter ({error}).") from error
    path.chmod(mode)


FILE_WRITERS = {"npz": write_npz, "safetensors": write_safetensors}
"""The functions that write a file, by its suffix without the dot."""
