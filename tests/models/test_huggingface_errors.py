"""Damaged Hugging Face folders and wrong parameters: each is named."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_folders import SMALL, copied, fixture, rewrite

from fedpax.models import huggingface
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.models.transformer import transformer


@pytest.fixture
def params(random_params: Callable[[FunctionalModel], Any]) -> Any:
    return random_params(transformer(SMALL))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.pop("output"), "params lacks output"),
        (lambda p: p.update(bias=np.ones(3)), "params has bias, which config does not use"),
        (lambda p: p.update(output=np.ones((3, 16))), r"output has shape \(3, 16\).*\(32, 16\)"),
        (lambda p: p.update(output=np.ones((32, 16), int)), "output has dtype int64: expected"),
    ],
)
def test_wrong_parameters_are_named(change: Any, words: str, params: Any, tmp_path: Path) -> None:
    change(params)
    with pytest.raises(ValueError, match=words):
        huggingface.save(tmp_path, SMALL, params)
    with pytest.raises(ValueError, match="max_shard_bytes=0: expected a positive"):
        huggingface.save(tmp_path, SMALL, params, max_shard_bytes=0)


def replace_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size]) and None


def edit(**changes: Any) -> Callable[[Path], None]:
    """Replace tensors of layer 0; None removes one."""

    def change(tensors: dict[str, Any]) -> None:
        for name, value in changes.items():
            name = f"model.layers.0.{name.replace('__', '.')}.weight"
            tensors.pop(name, None)
            tensors |= {} if value is None else {name: value}

    return lambda folder: rewrite(folder, change)


PART, INDEX = "model-00002-of-00002.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("llama", shutil.rmtree, FileNotFoundError, "is not a folder"),
        ("llama", lambda f: (f / "config.json").unlink(), FileNotFoundError, "config.json does"),
        ("llama", lambda f: (f / PART).unlink(), FileNotFoundError, f"{PART}, listed in"),
        ("llama", lambda f: (f / INDEX).unlink(), FileNotFoundError, "neither model.safetensors"),
        (
            "mistral",
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            FileNotFoundError,
            "Convert pytorch_model.bin to safetensors",
        ),
        ("llama", truncate("config.json", 30), ValueError, r"config.json is damaged: .* again\."),
        ("llama", truncate(INDEX, 30), ValueError, "index.json is damaged"),
        ("llama", replace_text(INDEX, "weight_map", "map"), ValueError, "expected weight_map"),
        ("llama", replace_text(INDEX, PART, "../x"), ValueError, r"\.\./x is not a file of this"),
        ("llama", replace_text(INDEX, "model.norm", "norm"), ValueError, f"{PART}: tensors listed"),
        ("llama", truncate(PART, 5), ValueError, rf"{PART} is damaged: .* again\."),
        ("llama", truncate(PART, 9000), ValueError, rf"{PART} is damaged: .* again\."),
        (
            "mistral",
            lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 99),
            ValueError,
            "model.safetensors is damaged",
        ),
        (
            "mistral",
            edit(self_attn__q_proj=None, mlp__up_proj=None),
            ValueError,
            "are missing: model.layers.0.self_attn.q_proj.weight, model.layers.0.mlp.up_proj",
        ),
        (
            "mistral",
            edit(self_attn__q_norm=np.ones(4, np.float32)),
            ValueError,
            "no parameters for the tensors model.layers.0.self_attn.q_norm.weight",
        ),
        (
            "mistral",
            edit(mlp__up_proj=np.ones((16, 24), np.float32)),
            ValueError,
            r"mlp.up_proj.weight has shape \(16, 24\), but config.json says \(24, 16\)",
        ),
        (
            "mistral",
            edit(mlp__up_proj=np.ones((24, 16), np.int8)),
            ValueError,
            "mlp.up_proj.weight has dtype I8: expected F64, F32, F16, BF16",
        ),
    ],
)
def test_damaged_folders_are_named(
    name: str, change: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    folder = copied(name, tmp_path)
    change(folder)
    with pytest.raises(error, match=words) as raised:
        huggingface.load(folder)
    assert str(folder) in str(raised.value)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"safetensors.*install fedpax\[huggingface\]"):
        huggingface.load(fixture("llama"))
