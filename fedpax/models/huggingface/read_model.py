"""Read a Hugging Face folder: configuration, then parameters, shard by shard."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from fedpax.algorithm import Params
from fedpax.errors import ArgumentError, MissingPackageError
from fedpax.files import check_fetched
from fedpax.models.huggingface.config import from_entries
from fedpax.models.huggingface.tensors import (
    AGAIN,
    CONFIG,
    INDEX,
    Bounds,
    StoredParameter,
    bounds_of,
    check_entries,
    check_sizes,
    existing_folder,
    flatten,
    listed,
    read_entries,
    stored_parameters,
    weight_files,
)
from fedpax.models.transformer import transformer
from fedpax.models.transformer_config import TransformerConfig
from fedpax.parallel import axes
from fedpax.parallel.axes import ShardingTree

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def load(
    folder: str | Path, *, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> tuple[TransformerConfig, Params]:
    """Read a Hugging Face folder.

    Args:
        folder: the folder, with config.json and model.safetensors, or
            model.safetensors.index.json and the files that it lists.
        mesh: shard the parameters over this mesh by `fedpax.parallel.axes.RULES`. Default None:
            arrays on the default device.
        dtype: cast the parameters to this dtype. Default None: keep the dtype of the files.

    Returns:
        The configuration, see `load_config`, and the parameters, see `load_params`.

    Raises:
        FileNotFoundError: the folder or one of its files does not exist.
        ValueError: the folder is damaged, or needs a feature that the transformer does not have.
        ImportError: the package safetensors is not installed.

    Example:
        >>> import tempfile
        >>> from fedpax.models.huggingface.write_model import save
        >>> config = TransformerConfig(num_layers=2, scale_embeddings=False)
        >>> params = jax.jit(transformer(config).init)(jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, config, params)
        ...     again, loaded = load(folder)
        >>> again == config, bool((loaded["embedding"] == params["embedding"]).all())
        (True, True)
    """
    config = load_config(folder)
    return config, load_params(folder, config, mesh=mesh, dtype=dtype)


def load_config(folder: str | Path) -> TransformerConfig:
    """Read the configuration of a Hugging Face folder.

    Returns:
        The configuration. `dtype` is the one that config.json names, and float32 in place of
        float16. Options of execution have their defaults.

    Raises:
        FileNotFoundError: the folder or config.json does not exist.
        ValueError: config.json is damaged, needs a feature that the transformer does not have, or
            has another size than the tensors in the folder's files, if it has any.
    """
    entries, source = read_entries(folder)
    check_entries(entries, source, existing_folder(folder))
    return from_entries(entries, source)


def load_params(
    folder: str | Path,
    config: TransformerConfig,
    *,
    mesh: Mesh | None = None,
    shardings: ShardingTree | None = None,
    dtype: DTypeLike | None = None,
) -> Params:
    """Read the parameters of a Hugging Face folder.

    The host needs memory for one shard of one parameter.

    Args:
        folder: as in `load`.
        config: the result of `load_config`, or the same with other options of execution.
        mesh: as in `load`.
        shardings: the sharding of each parameter, in place of `mesh`. Default None for both:
            arrays on the default device.
        dtype: as in `load`.

    Raises:
        FileNotFoundError: the folder or one of its files does not exist.
        ValueError: a file is damaged; tensors are missing, unknown or of another shape than the
            configuration says; or both `mesh` and `shardings` are given.
        ImportError: the package safetensors is not installed.
    """
    if mesh is not None and shardings is not None:
        raise ArgumentError("load_params() got mesh and shardings: pass one of them, or none.")
    path = existing_folder(folder)
    check_sizes(config, path)  # before anything of these sizes is made
    model, stored = transformer(config), stored_parameters(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    if mesh is not None:
        shardings = axes.shardings(model.logical_axes, shapes, mesh)
    by_path = {} if shardings is None else flatten(shardings)
    if shardings is not None and by_path.keys() != stored.keys():
        differing = sorted(by_path.keys() ^ stored.keys())
        raise ArgumentError(
            f"shardings has other parameters than the transformer: {listed(differing)}. Pass one "
            "sharding for each parameter."
        )
    target = None if dtype is None else np.dtype(dtype)
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(path, stack)
        _check_tensors(tensors, stored, path, config.tied_embeddings)
        params = {
            path: _read(parameter, tensors, by_path.get(path), _dtype(parameter, tensors, target))
            for path, parameter in stored.items()
        }
    return jax.tree.unflatten(jax.tree.structure(shapes), params.values())


def safetensors(module: str, use: str = "Hugging Face folders need") -> Any:
    """Import a module of the package safetensors; an error says what it is used for."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackageError(
            f"{use} the package safetensors, which is not installed: install fedpax[huggingface]."
        ) from None


def _open_tensors(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return the safetensors slice of each tensor in the folder's files, by name."""
    listing = weight_files(folder)
    library = safetensors("safetensors")
    tensors: dict[str, Any] = {}
    for name, expected in listing.items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}, listed in {INDEX}, does not exist. {AGAIN}")
        check_fetched(path)
        try:
            file = stack.enter_context(library.safe_open(path, framework="numpy"))
        except library.SafetensorError as error:
            raise ArgumentError(f"{path} is damaged: {error}. {AGAIN}") from None
        names = set(file.keys())
        if missing := sorted((expected or set()) - names):
            raise ArgumentError(
                f"{path}: tensors listed in {INDEX} are missing: {listed(missing)}. {AGAIN}"
            )
        tensors |= {name: file.get_slice(name) for name in (expected or names)}
    return tensors


def _check_tensors(
    tensors: dict[str, Any], stored: Mapping[str, StoredParameter], folder: Path, tied: bool
) -> None:
    """Check names, shapes and dtypes before anything is read."""
    expected = {name: parameter for parameter in stored.values() for name in parameter.names()}
    if missing := [name for name in expected if name not in tensors]:
        raise ArgumentError(f"{folder}: tensors are missing: {listed(missing)}.")
    # Old Llama folders store the rotary frequencies, which config.json determines.
    unknown = [
        name
        for name in tensors
        if name not in expected and not name.endswith("rotary_emb.inv_freq")
    ]
    if tied and "lm_head.weight" in unknown:
        _check_tied(tensors, folder)
        unknown.remove("lm_head.weight")
    if unknown:
        raise ArgumentError(
            f"{folder}: the transformer has no parameters for the tensors {listed(unknown)}."
        )
    for name, parameter in expected.items():
        shape, dtype = tuple(tensors[name].get_shape()), tensors[name].get_dtype()
        if shape != parameter.tensor_shape:
            raise ArgumentError(
                f"{folder}: {name} has shape {shape}, but {CONFIG} says {parameter.tensor_shape}."
            )
        if dtype not in DTYPES:
            raise ArgumentError(
                f"{folder}: {name} has dtype {dtype}: expected {', '.join(DTYPES)}."
            )


def _check_tied(tensors: dict[str, Any], folder: Path) -> None:
    """Check that an output projection stored beside a tied embedding table is a copy of it."""
    table, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    same = table.get_shape() == output.get_shape() and table.get_dtype() == output.get_dtype()
    rows, step = table.get_shape()[0], 4096
    chunks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    # Bytes, because a NaN differs from itself.
    if not same or any(table[chunk].tobytes() != output[chunk].tobytes() for chunk in chunks):
        raise ArgumentError(
            f"{folder}: {CONFIG} says tie_word_embeddings=True, but lm_head.weight differs from "
            "model.embed_tokens.weight. Set tie_word_embeddings to false in config.json."
        )


def _dtype(
    parameter: StoredParameter, tensors: Mapping[str, Any], target: np.dtype | None
) -> np.dtype:
    dtypes = {DTYPES[tensors[name].get_dtype()]: name for name in parameter.names()}
    if target is None and len(dtypes) > 1:
        raise ArgumentError(
            "Layers have different dtypes: "
            + ", ".join(f"{name} {dtype}" for dtype, name in dtypes.items())
            + ". Pass dtype= to cast them to one dtype."
        )
    dtype = next(iter(dtypes)) if target is None else target
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ArgumentError(
            f"{next(iter(dtypes.values()))} has dtype {dtype}, which needs JAX's 64-bit mode: set "
            "the environment variable JAX_ENABLE_X64=1, or give dtype='float32'."
        )
    return dtype


def _read(
    parameter: StoredParameter,
    tensors: Mapping[str, Any],
    sharding: Sharding | None,
    dtype: np.dtype,
) -> jax.Array:
    if sharding is None:
        whole = tuple((0, size) for size in parameter.shape)
        return jax.device_put(_read_shard(parameter, tensors, whole, dtype))
    # jax.make_array_from_callback keeps the shards of all devices in the host's memory, and calls
    # back once for each copy.
    devices: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(parameter.shape).items():
        bounds = bounds_of(index, parameter.shape)
        devices.setdefault(bounds, []).append(device)
    shards = []
    for bounds, copies in devices.items():
        values = _read_shard(parameter, tensors, bounds, dtype)
        shards += [jax.block_until_ready(jax.device_put(values, device)) for device in copies]
    return jax.make_array_from_single_device_arrays(parameter.shape, sharding, shards, dtype=dtype)


def _read_shard(
    parameter: StoredParameter, tensors: Mapping[str, Any], bounds: Bounds, dtype: np.dtype
) -> np.ndarray:
    count = len(parameter.stack_shape)
    part = tuple(slice(*pair) for pair in bounds[count:])
    values = np.empty([stop - start for start, stop in bounds], dtype)
    for local in np.ndindex(values.shape[:count]):
        index = tuple(i + start for i, (start, _) in zip(local, bounds, strict=False))
        values[local] = parameter.from_tensor(tensors[parameter.name(index)], part)
    return values
