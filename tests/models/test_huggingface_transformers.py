"""Models go to and from the package transformers; skipped where it is not installed."""

import json
from pathlib import Path
from typing import Any

import huggingface_models
import jax
import numpy as np
import pytest

from fedpax.models import huggingface
from fedpax.models.transformer import TransformerConfig, transformer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 0.01}),
    ("Llama", {"rope_parameters": huggingface_models.LLAMA3_ROPE, "tie_word_embeddings": True}),
    ("Llama", {"head_dim": 10, "num_key_value_heads": 1}),
    ("Mistral", {"sliding_window": None, "head_dim": 2}),
    ("Mistral", {"sliding_window": 3}),
    ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    ("Mixtral", {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ("Qwen3", {"head_dim": 6}),
    (
        "Qwen3",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 0,
        },
    ),
]


def logits_of(config: TransformerConfig, params: Any, tokens: Any) -> Any:
    return jax.jit(transformer(config).apply)(params, tokens)


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_models_go_to_and_from_transformers(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = huggingface_models.make_model(family, options, seed=len(str(options)))
    tokens = huggingface_models.draw_tokens(seed=1)
    expected = huggingface_models.logits_of(model, tokens)
    huggingface_models.save_model(model, tmp_path / "original")
    config, params = huggingface.load(tmp_path / "original")
    np.testing.assert_allclose(logits_of(config, params, tokens), expected, rtol=0, atol=1e-5)

    huggingface.save(tmp_path / "ours", config, params, max_shard_bytes=10_000)
    again, information = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(information.values())
    assert again.dtype == torch.float32
    np.testing.assert_array_equal(huggingface_models.logits_of(again, tokens), expected)
    huggingface_models.save_model(again, tmp_path / "again")
    kept, original = (huggingface.load_config(tmp_path / name) for name in ("again", "original"))
    assert kept == original


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling_factor": 4.0, "rope_original_seq_len": 8},
        {"num_experts": 3, "num_experts_per_token": 2, "num_pipeline_repeats": 2},
        {"qk_norm": True, "sliding_window": 3, "tied_embeddings": True},
    ],
    ids=str,
)
def test_transformers_computes_our_logits(
    change: dict[str, Any], random_params: Any, tmp_path: Path
) -> None:
    config = TransformerConfig(
        **{"vocab_size": 32, "num_layers": 2, "embed_dim": 16, "num_heads": 4, "mlp_dim": 24}
        | {"tied_embeddings": False, "scale_embeddings": False, "head_dim": 6}
        | change
    )
    params = random_params(transformer(config))
    huggingface.save(tmp_path, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = huggingface_models.draw_tokens()
    expected = logits_of(config, params, tokens)
    actual = huggingface_models.logits_of(model, tokens)
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=1e-5)


def test_the_fixtures_are_those_that_transformers_writes(tmp_path: Path) -> None:
    huggingface_models.write_fixtures(tmp_path)
    for name in huggingface_models.MODELS:
        folder, original = tmp_path / name, huggingface_models.FOLDER / name
        names = {path.name for path in original.iterdir()}
        assert {path.name for path in folder.iterdir()} == names
        for path in (path for path in folder.glob("model*.safetensors")):
            assert path.read_bytes() == (original / path.name).read_bytes()
        written, kept = (json.loads((f / "config.json").read_text()) for f in (folder, original))
        assert replace_version(written) == replace_version(kept)


def replace_version(entries: dict[str, Any]) -> dict[str, Any]:
    return entries | {"transformers_version": ""}
