"""Weights of Hugging Face folders: logits of transformers, round trips, sharded reading."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import huggingface_models
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from huggingface_folders import SMALL, copied, fixture, rewrite, tensors_in
from jax.sharding import AxisType
from safetensors.numpy import load_file

from fedpax.models import huggingface
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.models.transformer import transformer
from fedpax.parallel.axes import shardings

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FAMILIES = list(huggingface_models.MODELS)
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def params(random_params: Callable[[FunctionalModel], Any]) -> Any:
    return random_params(transformer(SMALL))


def assert_identical(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    config, params = huggingface.load(fixture(name), dtype="float32")
    expected = load_file(fixture(name) / "expected.safetensors")
    model = transformer(replace(config, dtype="float32"))
    logits = jax.jit(model.apply)(params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "max_shard_bytes", [pytest.param(n, marks=pytest.mark.slow) for n in (5 * 10**9, 1)] + [10_000]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_is_bitwise(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    config, params = huggingface.load(fixture(name))
    huggingface.save(tmp_path, config, params, max_shard_bytes=max_shard_bytes)
    assert_identical(tensors_in(tmp_path), tensors_in(fixture(name)))
    again, loaded = huggingface.load(tmp_path)
    assert again == config
    assert_identical(loaded, params)
    count = len(list(tmp_path.glob("*.safetensors")))
    assert (count == 1) == (max_shard_bytes == 5 * 10**9)
    if max_shard_bytes == 1:
        assert count == len(tensors_in(tmp_path))


def test_files_are_filled_in_the_order_of_the_layers(params: Any, tmp_path: Path) -> None:
    huggingface.save(tmp_path, SMALL, params, max_shard_bytes=30_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = {name: value.nbytes for name, value in tensors_in(tmp_path).items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert sizes.keys() == index["weight_map"].keys()
    files: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        files.setdefault(file, []).append(name)
    assert list(files) == [f"model-{i + 1:05}-of-00004.safetensors" for i in range(4)]
    assert all(sum(sizes[name] for name in names) <= 30_000 for names in files.values())
    for file, names in files.items():
        assert sorted(names) == sorted(load_file(tmp_path / file))
    layers = [name.split(".")[2] for name in index["weight_map"] if ".layers." in name]
    assert layers == sorted(layers)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        pytest.param({"fsdp": 2, "tensor": 2, "data": 2}, AUTO, marks=pytest.mark.slow),
        ({"fsdp": 2, "tensor": 2, "data": 2}, EXPLICIT),
        pytest.param({"expert": 2, "stage": 4}, AUTO, marks=pytest.mark.slow),
        pytest.param({"clients": 2, "fsdp": 4}, AUTO, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sharded_parameters_are_read_and_written(
    sizes: dict[str, int], kind: AxisType, params: Any, tmp_path: Path
) -> None:
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    expected = shardings(transformer(SMALL).logical_axes, params, mesh)
    huggingface.save(tmp_path / "1", SMALL, params)
    with jax.set_mesh(mesh):
        _, loaded = huggingface.load(tmp_path / "1", mesh=mesh)
        huggingface.save(tmp_path / "2", SMALL, loaded)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == expected
    assert_identical(jax.device_get(loaded), params)
    single = "model.safetensors"
    assert (tmp_path / "2" / single).read_bytes() == (tmp_path / "1" / single).read_bytes()


def test_each_shard_is_read_once_and_alone(
    params: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the axis data holds two copies of each shard."""
    huggingface.save(tmp_path, SMALL, params)
    reads: dict[str, list[int]] = {}

    class Counted:
        def __init__(self, name: str, tensor: Any):
            self.name, self.tensor = name, tensor
            self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

        def __getitem__(self, index: Any) -> Any:
            part = self.tensor[index]
            reads.setdefault(self.name, []).append(part.size)
            return part

    class Opened:
        def __init__(self, file: Any):
            self.keys = file.keys
            self.get_slice = lambda name: Counted(name, file.get_slice(name))

    @contextlib.contextmanager
    def safe_open(*args: Any, **options: Any) -> Iterator[Opened]:
        with original(*args, **options) as file:
            yield Opened(file)

    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "data"), axis_types=(AUTO,) * 3)
    huggingface.load_params(tmp_path, SMALL, mesh=mesh)
    sizes = {name: value.size for name, value in tensors_in(tmp_path).items()}
    assert {name: sum(counts) for name, counts in reads.items()} == sizes
    assert reads[QUERY] == [16 * 16 // 4] * 4
    assert reads["model.norm.weight"] == [16]


def test_given_shardings_are_used(params: Any, tmp_path: Path) -> None:
    """Even of axes that the tensors merge."""
    huggingface.save(tmp_path, SMALL, params)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AUTO,) * 2, devices=jax.devices()[:4])
    replicated = jax.sharding.NamedSharding(mesh, jax.P())
    tree = jax.tree.map(lambda _: replicated, params)
    for name in ("query", "output"):
        spec = jax.P(None, "a", None, "b") if name == "query" else jax.P("b", None, "a")
        tree["layers"]["attention"][name] = jax.sharding.NamedSharding(mesh, spec)
    loaded = huggingface.load_params(tmp_path, SMALL, shardings=tree)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == tree
    assert_identical(jax.device_get(loaded), params)
    with pytest.raises(ValueError, match="pass one of them"):
        huggingface.load_params(tmp_path, SMALL, shardings=tree, mesh=mesh)
    del tree["output"]
    with pytest.raises(ValueError, match="other parameters than the transformer: output"):
        huggingface.load_params(tmp_path, SMALL, shardings=tree)


def test_pipeline_repeats_hold_the_same_layers(params: Any, tmp_path: Path) -> None:
    config = replace(SMALL, num_pipeline_repeats=2)
    huggingface.save(tmp_path / "1", SMALL, params)
    loaded = huggingface.load_params(tmp_path / "1", config)
    shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
    chex.assert_trees_all_equal_shapes(loaded, shapes)
    layers = jax.tree.map(lambda leaf: leaf.reshape(4, *leaf.shape[2:]), loaded["layers"])
    assert_identical(layers, params["layers"])
    huggingface.save(tmp_path / "2", config, loaded)
    assert_identical(tensors_in(tmp_path / "2"), tensors_in(tmp_path / "1"))


@pytest.mark.slow
def test_dtypes_are_kept_or_cast(tmp_path: Path) -> None:
    config, params = huggingface.load(fixture("qwen3"))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    again, cast = huggingface.load(fixture("qwen3"), dtype=jnp.float32)
    assert again == config
    assert_identical(cast, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))
    # float32 weights rounded to bfloat16 as JAX rounds them.
    _, wide = huggingface.load(fixture("mistral"))
    _, narrow = huggingface.load(fixture("mistral"), dtype="bfloat16")
    assert_identical(narrow, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), wide)
    huggingface.save(tmp_path, config := huggingface.load_config(fixture("mistral")), half)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    again, loaded = huggingface.load(tmp_path)
    assert again == config
    assert_identical(loaded, half)


def test_float64_needs_the_64_bit_mode(params: Any, tmp_path: Path) -> None:
    params = jax.tree.map(np.float64, params)
    huggingface.save(tmp_path, SMALL, params)
    with pytest.raises(ValueError, match=r"float64.*JAX_ENABLE_X64=1"):
        huggingface.load_params(tmp_path, SMALL)
    with jax.enable_x64(True):
        config, loaded = huggingface.load(tmp_path)
        assert_identical(loaded, params)
    assert config.dtype == "float64"


def test_layers_of_different_dtypes_need_a_dtype(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    rewrite(folder, lambda t: t.update({QUERY: t[QUERY].astype(ml_dtypes.bfloat16)}))
    with pytest.raises(ValueError, match=r"different dtypes: .*layers.1.*float32.* Pass dtype="):
        huggingface.load(folder)
    _, params = huggingface.load(folder, dtype="float32")
    assert params["layers"]["attention"]["query"].dtype == jnp.float32


def test_a_copy_of_tied_embeddings_is_accepted(tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path)
    table = tensors_in(folder)["model.embed_tokens.weight"]
    rewrite(folder, lambda t: t.update({"lm_head.weight": table}))
    assert "output" not in huggingface.load(folder)[1]
    rewrite(folder, lambda t: t.update({"lm_head.weight": 2 * table}))
    with pytest.raises(ValueError, match=r"lm_head.weight differs .* tie_word_embeddings to false"):
        huggingface.load(folder)


def test_rotary_frequencies_of_old_folders_are_ignored(tmp_path: Path) -> None:
    folder = copied("mistral", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: np.ones(2, np.float32)}))
    assert_identical(huggingface.load(folder)[1], huggingface.load(fixture("mistral"))[1])


def test_other_entries_are_kept_from_a_folder(tmp_path: Path) -> None:
    config, params = huggingface.load(fixture("llama"))
    huggingface.save(
        tmp_path / "1", replace(config, remat="full"), params, original_folder=fixture("llama")
    )
    kept, original = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "1", fixture("llama"))
    )
    assert kept == {**original, "torch_dtype": "float32"} and kept["eos_token_id"] == 2
    with pytest.raises(ValueError, match=r"another model .* they differ in sliding_window"):
        other = replace(config, sliding_window=3)
        huggingface.save(tmp_path / "2", other, params, original_folder=fixture("llama"))


def test_a_model_is_shared_as_other_files_are_and_not_overwritten(
    params: Any, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    huggingface.save(tmp_path, SMALL, params)
    # Others can read the weights as they can any other file of this user.
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["tokenizer.json"]
    with pytest.raises(FileExistsError, match=r"already: config.json, model.safetensors.*remove"):
        huggingface.save(tmp_path, SMALL, params)
