"""Experiments that begin from Hugging Face folders, and those that train adapters."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fedpax.commands.parts.options import configure
from fedpax.data import train_tokenizer
from fedpax.experiments import language_model_experiment
from fedpax.experiments.fedavg_text import FedAvgText, fedavg_lora_text
from fedpax.experiments.parts.client_text import ClientTextConfig
from fedpax.experiments.parts.weights import write_huggingface
from fedpax.experiments.pretrain import pretrain_text
from fedpax.models import huggingface, lora
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.run_files.configuration import write_configuration
from fedpax.training.compiled_round import compile_round, init_state
from fedpax.training.experiment import Run

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "mlp_dim": 32,
    "scale_embeddings": False,
}


def write_model(folder: Path, **options: Any) -> Path:
    """Write a random model, in bfloat16."""
    config = TransformerConfig(**SIZES | {"dtype": "bfloat16"} | options)
    shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
    random = np.random.default_rng(0)
    huggingface.save(
        folder,
        config,
        jax.tree.map(
            lambda x: (0.2 * random.normal(size=x.shape)).astype(jnp.dtype(config.dtype)), shapes
        ),
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("weights"))


def test_the_architecture_is_that_of_the_folder(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder.parent)
    experiment: Any = configure(
        "pretrain_text",
        [f"--model.weights={folder.name}", "--model.remat=full", "--loss.z_loss_weight=0.5"],
    )
    expected = TransformerConfig(
        **SIZES, dtype="bfloat16", remat="full", unroll=3, weights=str(folder)
    )
    assert experiment.model == expected and experiment.loss.z_loss_weight == 0.5
    assert experiment.data.tokenizer == "bytes"
    in_python = pretrain_text().with_weights(folder)
    assert in_python.model == dataclasses.replace(expected, remat="none")


def test_each_device_reads_its_part_of_the_weights(folder: Path) -> None:
    run = configure("pretrain_text", [f"--model.weights={folder}", "--mesh.fsdp=8"]).build()
    assert run.initial is not None and run.frozen is None
    params = run.initial.load()
    stored = huggingface.load(folder)[1]
    for leaf, sharding, expected in zip(
        *map(jax.tree.leaves, (params, run.shardings.params, stored)), strict=True
    ):
        assert leaf.sharding == sharding and leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf, expected.astype(np.float32))
    embedding = params["embedding"]
    assert {shard.data.shape for shard in embedding.addressable_shards} == {(256, 2)}


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.num_layers=3", "--model.rope_base=7.0"],
        ["--model.vocab_size=300"],
        ["--model.embed_dim=128"],  # and so the default of head_dim
    ],
)
def test_flags_that_contradict_the_folder_raise(folder: Path, flags: list[str]) -> None:
    with pytest.raises(ValueError, match=r"has another model: .*Leave out these flags") as raised:
        configure("pretrain_text", [f"--model.weights={folder}", *flags])
    for flag in flags:
        assert f"{flag} (in the folder: " in str(raised.value)
    assert "None" not in str(raised.value)


def test_a_configuration_in_python_that_contradicts_the_folder_raises(folder: Path) -> None:
    experiment = pretrain_text()
    model = dataclasses.replace(experiment.model, weights=str(folder))
    run = dataclasses.replace(experiment, model=model).build()
    assert run.initial is not None
    with pytest.raises(ValueError, match=r"use experiment\.with_weights\(folder\)"):
        run.initial.load()


def test_the_tokenizer_is_that_of_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path, vocab_size=300)
    flags = [f"--model.weights={folder}", "--mesh.fsdp=1"]
    run = configure("pretrain_text", flags).build()
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json': there is no such file. Pass"):
        next(run.cohorts)
    (folder / "tokenizer.model").write_bytes(b"")
    assert pretrain_text().with_weights(folder).data.tokenizer == str(folder / "tokenizer.model")
    pytest.importorskip("tokenizers")
    train_tokenizer(["to be or not to be"] * 9, vocab_size=262, path=folder / "tokenizer.json")
    experiment: Any = configure("pretrain_text", flags)
    assert experiment.data.tokenizer == str(folder / "tokenizer.json")
    assert experiment.read_tokenizer().vocab_size > 256
    given: Any = configure("pretrain_text", [*flags, "--data.tokenizer=bytes"])
    assert given.data.tokenizer == "bytes"


def test_a_tokenizer_of_more_tokens_than_the_weights_raises(tmp_path: Path) -> None:
    folder = write_model(tmp_path, vocab_size=200)
    flags = [f"--model.weights={folder}", "--data.tokenizer=bytes", "--mesh.fsdp=1"]
    with pytest.raises(
        ValueError, match=r"256 tokens, but .*Set --data.tokenizer to the tokenizer of the"
    ):
        next(configure("pretrain_text", flags).build().cohorts)


def test_a_run_that_resumes_does_not_need_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "weights"))
    flags = [f"--model.weights={moved}", "--mesh.fsdp=1"]
    experiment = configure("pretrain_text", flags, tmp_path / "run")
    write_configuration(tmp_path / "run", experiment, "pretrain_text")
    shutil.rmtree(moved)
    with pytest.raises(FileNotFoundError, match="is not a folder: expected a Hugging Face folder"):
        configure("pretrain_text", flags, tmp_path / "run")  # no checkpoint yet
    monkeypatch.setattr(language_model_experiment, "latest_round", lambda job_log_dir: 1)
    assert configure("pretrain_text", flags, tmp_path / "run") == experiment


def small_fedavg(folder: Path) -> FedAvgText:
    base = fedavg_lora_text().with_weights(folder)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, unroll=1),
        data=ClientTextConfig(seq_len=16, heldout_batch_size=32, heldout_tokens=2048),
        cohort=dataclasses.replace(base.cohort, size=8, batch_size=4, max_steps=4),
        optimizer=dataclasses.replace(base.optimizer, learning_rate=0.03),
    )


@pytest.mark.slow  # tests/models/test_lora.py and tests/training/test_frozen.py hold its parts
def test_fedavg_trains_and_sends_adapters_alone(tmp_path: Path) -> None:
    run = small_fedavg(write_model(tmp_path, dtype="float32", num_layers=1)).build()
    assert run.frozen is not None and run.whole_model is not None
    frozen = run.frozen.load()
    with jax.set_mesh(run.mesh):
        cohort = jax.device_put(next(run.cohorts), run.shardings.cohort)
        compiled = compile_round(run, cohort)
        state = init_state(run, compiled.state, seed=0)
        before = run.evaluate(state.params)["loss"]
        # The loss and its weight of a client cross with the adapters, 4 bytes each.
        sent = compiled.bytes_across_placement - 4 * compiled.num_parameters
        assert 0 < compiled.num_parameters < 6_000 and 0 <= sent < 100
        for _ in range(3):
            state, _ = compiled.round(state, cohort, frozen)
            cohort = jax.device_put(next(run.cohorts), run.shardings.cohort)
        after = run.evaluate(state.params)["loss"]
        assert after < before - 0.1
        whole = run.whole_model(state.params)
    stored = huggingface.load(tmp_path)[1]
    # Norms and embeddings have no adapters; the first layer's query has.
    np.testing.assert_array_equal(whole["embedding"], stored["embedding"])
    query, original = (tree["layers"]["attention"]["query"] for tree in (whole, stored))
    assert np.abs(np.asarray(query) - np.asarray(original)).max() > 1e-3


def test_adapters_without_weights_are_told_how_to_get_some() -> None:
    run = configure("diloco_text", ["--mesh.fsdp=2", "--lora.rank=4"]).build()
    assert run.frozen is not None
    with pytest.raises(ValueError, match=r"model.weights is missing: .*`fedpax export --job_log"):
        run.frozen.load()


def test_the_operations_of_frozen_weights_gradients_do_not_count() -> None:
    fields = "--data.seq_len=128", "--model.sliding_window=32"
    whole, adapted = (
        configure("pretrain_text", [*fields, f"--lora.rank={rank}"]).build() for rank in (0, 1)
    )
    assert 0.66 < adapted.flops_per_item / whole.flops_per_item < 0.72
    assert whole.flops_convention.startswith(
        "6 N + 12 L H d T for N parameters in matmuls and norms,"
    )
    assert adapted.flops_convention.startswith("4 N + 6 A + 12 L H d T for N frozen parameters")
    assert all(
        "the T = 32 keys of the sliding window" in x.flops_convention for x in (whole, adapted)
    )


def random_params(run: Run, seed: int) -> Any:
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(run.init, jax.random.key(0))
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_model_is_exported_in_the_form_of_the_folder_it_began_from(
    folder: Path, tmp_path: Path, rank: int
) -> None:
    flags = [f"--model.weights={folder}", "--mesh.fsdp=1", f"--lora.rank={rank}"]
    experiment: Any = configure("pretrain_text", flags)
    params = random_params(experiment.build(), seed=rank)
    experiment.write_model(tmp_path / "out", params, "pretrain_text")
    config, loaded = huggingface.load(tmp_path / "out")
    assert config == dataclasses.replace(huggingface.load_config(folder), dtype="float32")
    expected = params
    if rank:
        whole = huggingface.load(folder, dtype="float32")[1]
        expected = lora.merge(whole, params, experiment.lora)
    chex.assert_trees_all_close(loaded, expected, rtol=1e-6)


def test_a_model_of_no_family_is_exported_by_orbax(tmp_path: Path) -> None:
    flags = ["--mesh.fsdp=1", "--model.logit_softcap=30", "--model.num_layers=2"]
    experiment: Any = configure("pretrain_text", flags)
    params = random_params(experiment.build(), seed=1)
    experiment.write_model(tmp_path / "out", params, "pretrain_text")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"params", "config.json"}
    with ocp.StandardCheckpointer() as checkpointer:
        chex.assert_trees_all_equal(checkpointer.restore(tmp_path / "out" / "params"), params)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_scaled_embeddings_are_exported_with_their_scale(
    tied: bool, dtype: str, tmp_path: Path
) -> None:
    config = TransformerConfig(
        num_layers=1, embed_dim=24, num_heads=2, mlp_dim=16, tied_embeddings=tied, dtype=dtype
    )
    assert config.scale_embeddings  # the default
    params = jax.jit(transformer(config).init)(jax.random.key(0))
    write_huggingface(tmp_path, config, params, tokenizer="bytes", end_of_document=None)
    result, loaded = huggingface.load(tmp_path)
    assert not (result.scale_embeddings or result.tied_embeddings)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 256)
    expected, logits = (
        jax.jit(transformer(dataclasses.replace(each, dtype="float32")).apply)(values, tokens)
        for each, values in ((config, params), (result, loaded))
    )
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
