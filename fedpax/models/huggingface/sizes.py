"""Sizes in config.json, compared with the tensors of the files before anything is made of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from fedpax.errors import ArgumentError
from fedpax.files import open_regular
from fedpax.models.huggingface.config import FAMILIES
from fedpax.models.huggingface.folder import CONFIG, INDEX, SINGLE_FILE, weight_files
from fedpax.models.transformer_config import TransformerConfig

_LAYER = re.compile(r"model\.layers\.(\d{1,18})\.(?:block_sparse_moe\.experts\.(\d{1,18})\.)?")
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
        if match := _LAYER.match(name):
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
