"""config.json and TransformerConfig: both ways, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_models
import pytest

from fedpax.models import huggingface, presets
from fedpax.models.huggingface.config import differing_fields, from_entries, to_entries
from fedpax.models.transformer_config import TransformerConfig

SMALL = TransformerConfig(
    vocab_size=32,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    tied_embeddings=False,
    scale_embeddings=False,
)
LLAMA = {"model_type": "llama", **huggingface_models.SIZES}


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        (
            "llama",
            {
                "norm_eps": 1e-5,
                "rope_base": 1000.0,
                "rope_scaling_factor": 8.0,
                "rope_original_seq_len": 16,
            },
        ),
        ("mistral", {"norm_eps": 1e-5, "sliding_window": 4, "rope_original_seq_len": 131_072}),
        (
            "mixtral",
            {
                "norm_eps": 1e-5,
                "num_experts": 4,
                "rope_base": 1e6,
                "rope_original_seq_len": 131_072,
            },
        ),
        (
            "qwen3",
            {
                "qk_norm": True,
                "head_dim": 6,
                "tied_embeddings": True,
                "dtype": "bfloat16",
                "rope_original_seq_len": 32_768,
            },
        ),
    ],
)
def test_configurations_of_transformers_are_read(folder: str, change: dict[str, Any]) -> None:
    config = huggingface.load_config(huggingface_models.FOLDER / folder)
    assert config == replace(SMALL, **change)


# The published config.json of two presets, without the entries of no effect.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 128_001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 32_768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32_000,
}


@pytest.mark.parametrize(
    ("entries", "preset"),
    [(LLAMA_3_1_8B, presets.llama_3_1_8b), (MIXTRAL_8X7B, presets.mixtral_8x7b)],
    ids=["llama_3_1_8b", "mixtral_8x7b"],
)
def test_published_configurations_are_the_presets(entries: dict[str, Any], preset: Any) -> None:
    config = from_entries(entries, "config.json")
    assert differing_fields(config, preset()) == []
    assert config.dtype == preset().dtype


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied_embeddings": True, "norm_eps": 3e-7, "rope_base": 12_345.678},
        {"head_dim": 6, "num_kv_heads": 4},
        {"rope_scaling_factor": 32.0, "rope_original_seq_len": 64, "dtype": "bfloat16"},
        {"sliding_window": 5, "rope_original_seq_len": 100},
        {"num_experts": 6, "num_experts_per_token": 3},
        {"num_experts": 2, "sliding_window": 3, "tied_embeddings": True},
        {"qk_norm": True, "head_dim": 128},
        {"qk_norm": True, "sliding_window": 7},
    ],
    ids=str,
)
def test_configurations_are_the_same_after_both_conversions(change: dict[str, Any]) -> None:
    config = replace(SMALL, **change)
    entries = json.loads(json.dumps(to_entries(config, config.dtype)))
    assert from_entries(entries, "config.json") == config
    # Entries of transformers before version 5 only: rope_theta and rope_scaling.
    del entries["rope_parameters"], entries["dtype"]
    assert from_entries(entries, "config.json") == config


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("llama", {"num_kv_heads": 32}),
        ("mistral", {"num_kv_heads": 8, "sliding_window": 4096}),
        ("mixtral", {"num_kv_heads": 8, "num_experts": 8, "norm_eps": 1e-5, "rope_base": 1e6}),
        ("qwen3", {"num_kv_heads": 32, "head_dim": 128, "qk_norm": True}),
    ],
)
def test_absent_entries_have_the_defaults_of_transformers(
    model_type: str, change: dict[str, Any]
) -> None:
    entries = LLAMA | {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 32}
    del entries["num_key_value_heads"]
    config = from_entries(entries, "config.json")
    assert config == replace(SMALL, embed_dim=64, num_heads=32, **change)


@pytest.mark.parametrize(
    ("entries", "window"),
    [
        ({"model_type": "llama", "sliding_window": 4}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mixtral"}, None),
        ({"model_type": "mixtral", "sliding_window": 4}, 4),
        ({"model_type": "qwen3", "sliding_window": 4}, None),
        ({"model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True}, None),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 4,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            4,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2,
            },
            4,
        ),
    ],
    ids=str,
)
def test_the_sliding_window_is_that_of_the_family(
    entries: dict[str, Any], window: int | None
) -> None:
    assert from_entries(LLAMA | entries, "config.json").sliding_window == window


def test_float16_folders_compute_in_float32() -> None:
    assert from_entries(LLAMA | {"torch_dtype": "float16"}, "config.json").dtype == "float32"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' .* one of llama, mistral, mixtral, qwen3"),
        ({"architectures": ["LlamaModel"]}, r"architectures=\['LlamaModel'\] .*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* 'silu' or 'swish'"),
        ({"attention_bias": True}, "attention_bias=True .* expected False"),
        ({"mlp_bias": True}, "mlp_bias=True .* expected False"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 .* expected 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*bits.* expected None"),
        ({"dtype": "int8"}, "dtype='int8' .* float32, bfloat16"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' .* True or False"),
        ({"hidden_size": None}, "entry hidden_size is missing"),
        ({"vocab_size": "32"}, "vocab_size='32': expected an integer"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True: expected a finite number"),
        ({"rope_theta": float("nan")}, "rope_theta=nan: expected a finite number"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] .* one of llama"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 does not divide"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type='yarn' .* 'default' or 'llama3'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters=.* one object of numbers",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters: partial_rotary_factor=0.5",
        ),
        (
            {"rope_scaling": huggingface_models.LLAMA3_ROPE | {"low_freq_factor": 2.0}},
            "rope_scaling: low_freq_factor=2.0 .* expected 1.0",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **{"low_freq_factor": 1}}},
            "rope_scaling: the entry high_freq_factor is missing",
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types=.* the same attention in all layers",
        ),
    ],
    ids=str,
)
def test_unsupported_entries_are_named(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^FOLDER/config.json.*{words}"):
        from_entries(LLAMA | entries, "FOLDER/config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale_embeddings": True}, "scale_embeddings=True: .* Only scale_embeddings=False"),
        ({"feed_forward": "gelu"}, "feed_forward='gelu': .* Only feed_forward='swiglu'"),
        ({"logit_softcap": 30.0}, "logit_softcap=30.0: .* Only logit_softcap=None"),
        ({"qk_norm": True, "num_experts": 4}, "qk_norm=True with num_experts=4: .* both"),
    ],
    ids=str,
)
def test_unsupported_fields_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        huggingface.save(tmp_path, replace(SMALL, **change), {})
    assert not list(tmp_path.iterdir())
