"""The tensors of a Hugging Face folder: names, shapes, and where they lie in the parameters."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np

from fedpax.errors import ArgumentError
from fedpax.files import check_fetched, open_regular, read_json
from fedpax.models.huggingface.config import FAMILIES
from fedpax.models.transformer import transformer
from fedpax.models.transformer_config import TransformerConfig
from fedpax.user_paths import expand_home

Index: TypeAlias = tuple[int, ...]
Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop of a part of an array along each axis."""


class TensorLayout(NamedTuple):
    """The place of one layer (of one expert) of a parameter in a tensor."""

    # PyTorch's linear layers are `[outputs, inputs]`, with heads merged with their features.

    name: str  # with {layer} and {expert}
    axes: Index  # the parameter's axes in the order of the tensor
    # Number of these axes that the tensor merges to its first axis; the rest is its second.
    num_row_axes: int = 1


class StoredParameter(NamedTuple):
    """A parameter of the transformer and the tensors that hold it."""

    layout: TensorLayout
    shape: tuple[int, ...]  # with the stacked axes
    # Leading axes of layers: 0 outside of the layers, 2 with pipeline repeats.
    num_layer_axes: int = 0
    num_expert_axes: int = 0  # 1 for the experts of a mixture, behind the axes of layers

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Sizes of the axes along which each index has its own tensor."""
        return self.shape[: self.num_layer_axes + self.num_expert_axes]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the other axes."""
        return self.shape[len(self.stack_shape) :]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor."""
        return tuple(math.prod(self.sizes[axis] for axis in group) for group in self.axis_groups)

    @property
    def axis_groups(self) -> list[Index]:
        """The parameter's axes that each axis of the tensor merges."""
        axes, count = self.layout.axes, self.layout.num_row_axes
        return [group for group in (axes[:count], axes[count:]) if group]

    def layer(self, index: Index) -> int:
        """Return the layer of an index into the stacked axes."""
        position = 0
        for size, i in zip(self.shape, index[: self.num_layer_axes], strict=False):
            position = position * size + i
        return position

    def name(self, index: Index) -> str:
        """Name the tensor of an index into the stacked axes."""
        expert = index[-1] if self.num_expert_axes else None
        return self.layout.name.format(layer=self.layer(index), expert=expert)

    def names(self) -> Iterator[str]:
        """Name all tensors."""
        return (self.name(index) for index in np.ndindex(self.stack_shape))

    def to_tensor(self, values: np.ndarray) -> np.ndarray:
        """Rearrange one layer, `sizes`, as a tensor, `tensor_shape`, contiguous in memory."""
        transposed = np.transpose(values, self.layout.axes)
        return np.ascontiguousarray(transposed.reshape(self.tensor_shape))

    def from_tensor(self, tensor: Any, index: tuple[slice, ...]) -> np.ndarray:
        """Read a part of one layer; of a safetensors slice only the rows and columns in use."""
        ranges, shape, rest = [], [], []
        for first, *rest_axes in self.axis_groups:
            # A merged axis is read along its first axis; the rest is selected in memory.
            inner = math.prod(self.sizes[axis] for axis in rest_axes)
            ranges.append(slice(index[first].start * inner, index[first].stop * inner))
            shape += [index[first].stop - index[first].start, *(self.sizes[a] for a in rest_axes)]
            rest += [slice(None), *(index[axis] for axis in rest_axes)]
        part = np.asarray(tensor[tuple(ranges)]).reshape(shape)[tuple(rest)]
        return np.transpose(part, np.argsort(self.layout.axes))


_LINEAR = (1, 0)  # a parameter is [inputs, outputs], a tensor [outputs, inputs]
_EXPERT = "model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{}.weight"
_LAYER = "model.layers.{{layer}}.{}.weight"

OUTER_LAYOUTS = {
    "embedding": TensorLayout("model.embed_tokens.weight", (0, 1)),
    "final_norm.scale": TensorLayout("model.norm.weight", (0,)),
    "output": TensorLayout("lm_head.weight", (0, 1)),
}
LAYER_LAYOUTS = {
    "attention_norm.scale": TensorLayout(_LAYER.format("input_layernorm"), (0,)),
    "attention.query": TensorLayout(_LAYER.format("self_attn.q_proj"), (1, 2, 0), 2),
    "attention.key": TensorLayout(_LAYER.format("self_attn.k_proj"), (1, 2, 0), 2),
    "attention.value": TensorLayout(_LAYER.format("self_attn.v_proj"), (1, 2, 0), 2),
    "attention.output": TensorLayout(_LAYER.format("self_attn.o_proj"), (2, 0, 1)),
    "attention.query_norm.scale": TensorLayout(_LAYER.format("self_attn.q_norm"), (0,)),
    "attention.key_norm.scale": TensorLayout(_LAYER.format("self_attn.k_norm"), (0,)),
    "feed_forward_norm.scale": TensorLayout(_LAYER.format("post_attention_layernorm"), (0,)),
    "feed_forward.gate": TensorLayout(_LAYER.format("mlp.gate_proj"), _LINEAR),
    "feed_forward.up": TensorLayout(_LAYER.format("mlp.up_proj"), _LINEAR),
    "feed_forward.down": TensorLayout(_LAYER.format("mlp.down_proj"), _LINEAR),
}
MIXTURE_LAYOUTS = {
    "feed_forward.router": TensorLayout(_LAYER.format("block_sparse_moe.gate"), _LINEAR),
    "feed_forward.gate": TensorLayout(_EXPERT.format("w1"), _LINEAR),
    "feed_forward.up": TensorLayout(_EXPERT.format("w3"), _LINEAR),
    "feed_forward.down": TensorLayout(_EXPERT.format("w2"), _LINEAR),
}


def stored_parameters(config: TransformerConfig) -> dict[str, StoredParameter]:
    """Describe each parameter of a transformer by its path, such as "layers.attention.query"."""
    stored = {}
    for path, leaf in flatten(jax.eval_shape(transformer(config).init, jax.random.key(0))).items():
        if not path.startswith("layers."):
            stored[path] = StoredParameter(OUTER_LAYOUTS[path], leaf.shape)
            continue
        layouts = LAYER_LAYOUTS | (MIXTURE_LAYOUTS if config.num_experts else {})
        layout = layouts[path.removeprefix("layers.")]
        num_layer_axes = 2 if config.num_pipeline_repeats > 1 else 1
        stored[path] = StoredParameter(
            layout, leaf.shape, num_layer_axes, "{expert}" in layout.name
        )
    return stored


def bounds_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Bounds:
    """Return the bounds of a shard from its index; None is the whole array."""
    index = (slice(None),) * len(shape) if index is None else index
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of nested dicts by their dotted paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


CONFIG, SINGLE_FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
AGAIN = "Copy or download the folder again."
_SHORT_INDEX = 2**20  # bytes, which are parsed in no time
_MOST_PER_HEADER = 100  # times: of a folder that is still downloading, not all files are there


def read_entries(folder: str | Path) -> tuple[dict[str, Any], str]:
    """Return the entries of a folder's config.json, and the name of that file."""
    path = existing_folder(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: expected a Hugging Face folder with {CONFIG}. Copy the file "
            "there, or give another folder."
        )
    return _json_object(path), str(path)


def listed(names: Collection[str]) -> str:
    """Join names; of many only the first five."""
    shown, more = list(names)[:5], len(names) - 5
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def existing_folder(folder: str | Path) -> Path:
    """Return the path of a Hugging Face folder, which must exist."""
    path = expand_home(folder)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder: expected a Hugging Face folder. Give a folder with {CONFIG} "
            "and safetensors files."
        )
    return path


def _json_object(path: Path) -> dict[str, Any]:
    check_fetched(path)
    try:
        value = read_json(path)
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise ArgumentError(f"{path} is damaged: {error}. {AGAIN}") from None
    if not isinstance(value, dict):
        raise ArgumentError(f"{path} is damaged: expected a JSON object. {AGAIN}")
    return value


def weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Return the tensors of each file of weights; None: all that the file has."""
    # In this order, as transformers does.
    if (folder / SINGLE_FILE).is_file():
        return {SINGLE_FILE: None}
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        remedy = f"Convert {listed(pickled)} to safetensors first." if pickled else AGAIN
        raise FileNotFoundError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}. {remedy}")
    _check_length(folder)
    names = _json_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ArgumentError(
            f"{folder / INDEX} is damaged: expected weight_map, a file per tensor. {AGAIN}"
        )
    files: dict[str, set[str]] = {}
    for name, file in names.items():
        files.setdefault(file, set()).add(name)
    if outside := sorted(file for file in files if Path(file).name != file):
        raise ArgumentError(f"{folder / INDEX}: {listed(outside)} is not a file of this folder.")
    return dict(files)


def _check_length(folder: Path) -> None:
    """Raise if an index is far longer than the headers of the files, before it is parsed."""
    length = (folder / INDEX).stat().st_size
    if length <= _SHORT_INDEX:
        return
    total = 0
    for path in folder.glob("*.safetensors"):
        with open_regular(path) as file:
            total += min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
    if length > _MOST_PER_HEADER * total:
        raise ArgumentError(
            f"{folder / INDEX} has {length:,} bytes, but the headers of the safetensors files, "
            f"which name the same tensors, have {total:,}. {AGAIN}"
        )


# ---- sizes in config.json, compared with the tensors of the files before anything is made of them

_LAYER_OF_NAME = re.compile(
    r"model\.layers\.(\d{1,18})\.(?:block_sparse_moe\.experts\.(\d{1,18})\.)?"
)
# The entries that are axes of tensors: the tensor and its axis, of a dense model or a mixture.
_AXES = (
    ("vocab_size", "model.embed_tokens.weight", 0),
    ("hidden_size", "model.embed_tokens.weight", 1),
    ("intermediate_size", "model.layers.0.mlp.gate_proj.weight", 0),
    ("intermediate_size", "model.layers.0.block_sparse_moe.experts.0.w1.weight", 0),
    ("head_dim", "model.layers.0.self_attn.q_norm.weight", 0),
)
_HEADS = {"num_attention_heads": "q_proj", "num_key_value_heads": "k_proj"}
_MOST_HEADER_BYTES = 100_000_000  # as safetensors has it


def check_entries(entries: Mapping[str, Any], source: str, folder: Path) -> None:
    """Compare the sizes in config.json with the folder's tensors, as far as it has both."""
    if not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX)):
        return
    names, shapes = _stored_tensors(folder)
    if not names:  # a damaged file
        return
    layers, experts = _numbers(names)
    sizes = {"num_hidden_layers": (layers, "layers")}
    if entries.get("model_type") in (None, "mixtral"):
        sizes["num_local_experts"] = experts, "experts"
    for name, tensor, axis in _AXES:
        if tensor in shapes and axis < len(shapes[tensor]):
            sizes[name] = (shapes[tensor][axis], f"in the shape {shapes[tensor]} of {tensor}")
    for name, (size, what) in sizes.items():
        value = entries.get(name)
        if _is_integer(value) and value != size:
            raise _differ(source, f"{name}={value}", f"{size} {what}")
    _check_heads(entries, source, shapes)


def check_sizes(config: TransformerConfig, folder: Path) -> None:
    """Compare the sizes of a configuration with the folder's tensors, as `check_entries` does."""
    entries = {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.resolved_head_dim,
        "intermediate_size": config.mlp_dim,
        "num_local_experts": config.num_experts,
    }
    check_entries(entries, "config", folder)


def _check_heads(
    entries: Mapping[str, Any], source: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare heads and their features, which the rows of projections have together."""
    model_type = entries.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    heads, hidden = entries.get("num_attention_heads"), entries.get("hidden_size")
    features = entries.get("head_dim") or (family and family.head_dim)
    if features is None and _is_integer(heads) and _is_integer(hidden) and heads > 0:
        features = hidden // heads
    default = {"num_key_value_heads": (family and family.num_kv_heads) or heads}
    for name, projection in _HEADS.items():
        count = entries.get(name) or default.get(name)
        shape = shapes.get(f"model.layers.0.self_attn.{projection}.weight")
        if shape and _is_integer(count) and _is_integer(features) and count * features != shape[0]:
            raise _differ(
                source,
                f"{name}={count} and head_dim={features}",
                f"{shape[0]} rows in the shape {shape} of {projection}",
            )


def _differ(source: str, says: str, stored: str) -> ValueError:
    return ArgumentError(
        f"{source}: {says}, but the safetensors files have {stored}. Correct {CONFIG}, or copy or "
        "download the folder again."
    )


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(names: Iterable[str]) -> tuple[int, int]:
    """Return the numbers of layers and of experts that tensors are named for."""
    layers = experts = 0
    for name in names:
        if match := _LAYER_OF_NAME.match(name):
            layers = max(layers, int(match[1]) + 1)
            experts = max(experts, int(match[2] or -1) + 1)
    return layers, experts


def _stored_tensors(folder: Path) -> tuple[set[str], dict[str, tuple[int, ...]]]:
    """Return the names of the tensors, and the shapes of tensors in readable files."""
    names: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    present = set(os.listdir(folder))
    for file, expected in weight_files(folder).items():
        stored = _read_header(folder / file) if file in present else {}
        names |= stored.keys() if expected is None else expected
        shapes |= stored
    return names, shapes


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file's tensors; none if the file is damaged."""
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(_MOST_HEADER_BYTES, path.stat().st_size):
                return {}
            header = json.loads(file.read(size))
        return {
            name: tuple(map(int, entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # reading the tensors says what is wrong
