"""Sizes in config.json that the files contradict are named within a second."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_folders import copied
from safetensors.numpy import load_file, save_file

from fedpax.models import huggingface

SIZES = {
    "llama": (
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    "mistral": ("num_hidden_layers", "num_attention_heads"),
    "mixtral": ("num_hidden_layers", "num_local_experts", "intermediate_size"),
    "qwen3": ("num_hidden_layers", "head_dim", "num_key_value_heads"),
}


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("value", [10**6, 10**9, 10**30])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_the_files_do_not_have_is_named(name: str, value: int, tmp_path: Path) -> None:
    for field in SIZES[name]:
        folder = copied(name, tmp_path / field)
        huggingface.load_config(folder)
        change_config(folder, **{field: value})
        start = time.perf_counter()
        with pytest.raises(ValueError, match=rf"{field}={value}.* but the safetensors .* have \d"):
            huggingface.load_config(folder)
        assert time.perf_counter() - start < 1


def test_params_of_another_number_of_layers_are_refused(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path)
    config = huggingface.load_config(folder)
    change_config(folder, num_hidden_layers=10**9, layer_types=None)
    (folder / "model.safetensors").rename(tmp_path / "weights")
    huge = huggingface.load_config(folder)  # without files, there is nothing to compare
    assert huge.num_layers == 10**9
    (tmp_path / "weights").rename(folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"layers={10**9}, but .* {config.num_layers} la"):
        huggingface.load_params(folder, huge)


def test_experts_in_a_dense_models_files_are_refused(tmp_path: Path) -> None:
    entries = json.loads((copied("mixtral", tmp_path) / "config.json").read_text())
    dense = copied("mistral", tmp_path)
    sizes = json.loads((dense / "config.json").read_text())
    shared = {name: sizes[name] for name in sizes.keys() & entries.keys() if name != "model_type"}
    del shared["architectures"]
    change_config(dense, **(entries | shared | {"num_local_experts": 10**9}))
    with pytest.raises(ValueError, match=f"num_local_experts={10**9}, but .* have 0 experts"):
        huggingface.load_config(dense)


def test_a_long_index_is_answered_at_once(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    path = folder / "model-1.safetensors"
    (folder / "model.safetensors").rename(path)
    names = [*load_file(path), *(f"model.layers.0.self_attn.{n}.weight" for n in range(500_000))]
    index = {"weight_map": dict.fromkeys(names, path.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"index\.json has 3\d,\d+,\d+ bytes, but the headers"):
        huggingface.load_config(folder)
    assert time.perf_counter() - start < 1
    for file in folder.glob("*.safetensors"):
        file.unlink()  # then no file has a header
    with pytest.raises(ValueError, match=r"but the headers of the safetensors files.*, have 0\."):
        huggingface.load_config(folder)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("file", ["model-1.safetensors", "{}.safetensors"])
def test_an_index_of_tensors_that_the_files_lack_is_read_in_linear_time(
    file: str, tmp_path: Path
) -> None:
    folder = copied("mistral", tmp_path)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {f"x{n}": file.format(n) for n in range(20_000)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"have 0 layers"):
        huggingface.load(folder)
    assert time.perf_counter() - start < 5  # with the square of the number of tensors, a minute


def test_pointers_of_git_lfs_are_called_so(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    config = huggingface.load_config(folder)
    for name in ("model-00001-of-00002.safetensors", "config.json"):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
            huggingface.load(folder)
    with pytest.raises(ValueError, match=r"00002\.safetensors is a Git LFS pointer"):
        huggingface.load_params(folder, config)


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    expected, path = huggingface.load_config(folder), folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert huggingface.load_config(folder) == expected


def test_a_header_longer_than_its_file_is_no_size(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    assert math.isfinite(huggingface.load_config(folder).num_layers)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        huggingface.load(folder)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tensors are missing"):
        huggingface.load(folder)


@pytest.mark.parametrize("field", ["sliding_window", "max_position_embeddings", "vocab_size"])
def test_an_integer_beyond_those_of_jax_is_named(field: str, tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    (folder / "model.safetensors").unlink()
    change_config(folder, **{field: 2**31})
    with pytest.raises(ValueError, match=rf"{field}=2147483648: expected at most 2147483647"):
        huggingface.load_config(folder)
