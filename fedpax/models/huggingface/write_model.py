"""Write a Hugging Face folder: config.json and safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedpax.algorithm import Params
from fedpax.errors import ArgumentError
from fedpax.models.huggingface.config import (
    differing_fields,
    dtype_entries,
    from_entries,
    to_entries,
)
from fedpax.models.huggingface.read_model import DTYPES, safetensors
from fedpax.models.huggingface.tensors import (
    CONFIG,
    INDEX,
    SINGLE_FILE,
    Index,
    StoredParameter,
    bounds_of,
    flatten,
    listed,
    read_entries,
    stored_parameters,
)
from fedpax.models.transformer_config import TransformerConfig
from fedpax.user_paths import expand_home


def save(
    folder: str | Path,
    config: TransformerConfig,
    params: Params,
    *,
    max_shard_bytes: int = 5 * 10**9,
    original_folder: str | Path | None = None,
) -> None:
    """Write a transformer as a Hugging Face folder.

    The host needs memory for one file at a time.

    Args:
        folder: the folder. It must not hold a model already.
        config: the transformer's configuration.
        params: its parameters, sharded or not. They keep their dtypes.
        max_shard_bytes: most bytes of a file, unless one tensor is larger.
        original_folder: the Hugging Face folder that the model was loaded from, whose config.json
            is written. Default None: write the entries that describe the model.

    Raises:
        FileExistsError: the folder holds a model already.
        ValueError: no supported family has the configuration's features; the parameters do not
            fit the configuration, or are spread over several processes; or `original_folder`
            describes another model.
        ImportError: the package safetensors is not installed.

    Example:
        >>> import tempfile
        >>> from fedpax.models.transformer import transformer
        >>> config = TransformerConfig(num_layers=2, scale_embeddings=False)
        >>> params = jax.jit(transformer(config).init)(jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, config, params, max_shard_bytes=2_000_000)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['config.json', 'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors',
         'model.safetensors.index.json']
    """
    if max_shard_bytes < 1:
        raise ArgumentError(
            f"max_shard_bytes={max_shard_bytes}: expected a positive number of bytes."
        )
    entries = to_entries(config, "float32")
    stored, leaves = stored_parameters(config), flatten(params)
    dtype = _check_params(stored, leaves)
    if original_folder is not None:
        kept, source = read_entries(original_folder)
        different = differing_fields(from_entries(kept, source), from_entries(entries, CONFIG))
        if different:
            raise ArgumentError(
                f"original_folder={str(original_folder)!r} describes another model than "
                f"config: they differ in {listed(different)}."
            )
        entries = kept
    entries |= dtype_entries(dtype)

    library = safetensors("safetensors.numpy")
    folder = expand_home(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in folder.iterdir())
    if held := [name for name in names if name == CONFIG or ".safetensors" in name]:
        raise FileExistsError(
            f"{folder} holds a model already: {listed(held)}. Save to another folder, or "
            "remove these files."
        )
    files = _split(_tensors(stored, leaves), max_shard_bytes)
    names = [SINGLE_FILE]
    if len(files) > 1:
        names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        values = {tensor.name: tensor.read() for tensor in tensors}
        # safetensors makes a file that its owner alone can read. An empty file has the usual mode.
        (folder / name).touch()
        mode = (folder / name).stat().st_mode
        # transformers rejects a file without this metadata.
        library.save_file(values, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(mode)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.size for file in files for tensor in file)},
            "weight_map": {
                tensor.name: name
                for name, tensors in zip(names, files, strict=True)
                for tensor in tensors
            },
        }
        _write_json(folder / INDEX, index)
    # Last, so that a folder whose writing was interrupted is not taken for a model.
    _write_json(folder / CONFIG, entries)


class _Tensor(NamedTuple):
    """A tensor to be written."""

    parameter: StoredParameter
    leaf: Any
    stack_index: Index

    @property
    def name(self) -> str:
        return self.parameter.name(self.stack_index)

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.parameter.tensor_shape) * self.leaf.dtype.itemsize

    def read(self) -> np.ndarray:
        return self.parameter.to_tensor(_to_host(self.leaf, self.stack_index))


def _tensors(stored: Mapping[str, StoredParameter], leaves: Mapping[str, Any]) -> list[_Tensor]:
    """List all tensors, first the ones outside of the layers, then layer by layer."""
    tensors = [
        _Tensor(parameter, leaves[path], index)
        for path, parameter in stored.items()
        for index in np.ndindex(parameter.stack_shape)
    ]

    def layer(tensor: _Tensor) -> int:
        return tensor.parameter.layer(tensor.stack_index) if tensor.parameter.num_layer_axes else -1

    return sorted(tensors, key=layer)


def _split(tensors: list[_Tensor], max_bytes: int) -> list[list[_Tensor]]:
    files: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.size > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.size
    return files


def _check_params(stored: Mapping[str, StoredParameter], leaves: Mapping[str, Any]) -> str:
    """Check names, shapes and dtypes of the parameters; return the widest dtype."""
    if missing := [path for path in stored if path not in leaves]:
        raise ArgumentError(f"params lacks {listed(missing)}, which config requires.")
    if unknown := [path for path in leaves if path not in stored]:
        raise ArgumentError(f"params has {listed(unknown)}, which config does not use.")
    dtypes = set()
    for path, parameter in stored.items():
        leaf = leaves[path]
        if leaf.shape != parameter.shape:
            raise ArgumentError(
                f"params: {path} has shape {leaf.shape}, but config says {parameter.shape}."
            )
        if leaf.dtype not in DTYPES.values():
            raise ArgumentError(
                f"params: {path} has dtype {leaf.dtype}: expected "
                f"{', '.join(dtype.name for dtype in DTYPES.values())}."
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ArgumentError(
                f"params: {path} is spread over several processes. Gather the parameters with "
                "jax.experimental.multihost_utils.process_allgather(params, tiled=True), and save "
                "them in one process."
            )
        dtypes.add(leaf.dtype)
    widest = next(iter(dtypes)) if len(dtypes) == 1 else np.dtype(jax.numpy.result_type(*dtypes))
    return widest.name


def _to_host(leaf: Any, index: Index) -> np.ndarray:
    """Copy leaf[index] to the host, without the rest of the leaf."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf[index])
    values = np.empty(leaf.shape[len(index) :], leaf.dtype)
    for shard in leaf.addressable_shards:
        bounds = bounds_of(shard.index, leaf.shape)
        stacked = bounds[: len(index)]
        if shard.replica_id or not all(
            start <= i < stop for i, (start, stop) in zip(index, stacked, strict=True)
        ):
            continue
        local = tuple(i - start for i, (start, _) in zip(index, stacked, strict=True))
        # A mesh of the shard's own device: JAX does not index it under the mesh of set_mesh.
        with jax.set_mesh(Mesh(np.array([shard.device]), ("device",))):
            part = np.asarray(shard.data[local] if local else shard.data)
        values[tuple(slice(*pair) for pair in bounds[len(index) :])] = part
    return values


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
