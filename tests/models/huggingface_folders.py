"""Copies of the Hugging Face folders of the tests, and models for them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_models
from safetensors.numpy import load_file, save_file

from fedpax.models.transformer import TransformerConfig

SMALL = TransformerConfig(
    vocab_size=32,
    num_layers=4,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    tied_embeddings=False,
    scale_embeddings=False,
    num_experts=4,
)


def fixture(name: str) -> Path:
    """Return the folder that transformers wrote."""
    return huggingface_models.FOLDER / name


def copied(name: str, folder: Path) -> Path:
    """Copy the folder that transformers wrote."""
    return Path(shutil.copytree(fixture(name), folder / name))


def tensors_in(folder: Path) -> dict[str, Any]:
    """Read all tensors of a folder's weights."""
    return {k: v for path in folder.glob("model*.safetensors") for k, v in load_file(path).items()}


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
