"""The tensors of a Hugging Face folder: names, shapes, and where they lie in the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from fedpax.models.transformer import transformer
from fedpax.models.transformer_config import TransformerConfig

Index: TypeAlias = tuple[int, ...]
Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop of a part of an array along each axis."""


class TensorLayout(NamedTuple):
    """The place of one layer (of one expert) of a parameter in a tensor."""

    # A linear layer's tensor in PyTorch is `[outputs, inputs]`, and its heads are merged with their
    # features.

    name: str  # name of the tensor, with {layer} and {expert}
    axes: Index  # the parameter's axes in the order of the tensor
    # Number of these axes that the tensor merges to its first axis; it merges the rest to its
    # second.
    num_row_axes: int = 1


class StoredParameter(NamedTuple):
    """A parameter of the transformer and the tensors that hold it."""

    layout: TensorLayout  # layout of each tensor
    shape: tuple[int, ...]  # shape of the parameter, with the stacked axes
    # Leading axes of layers: 0 outside of the layers, 2 with pipeline repeats.
    num_layer_axes: int = 0
    num_expert_axes: int = 0  # 1 for the experts of a mixture, behind the axes of layers

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Sizes of the axes along which each index has a tensor of its own."""
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
