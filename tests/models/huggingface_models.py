"""Tiny random models of the package transformers, and the fixtures that it wrote.

`python tests/models/huggingface_models.py` writes the folders in tests/models/huggingface again. It
needs torch 2.13 and transformers 5.23, which the tests themselves do not need.
"""

from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "huggingface"
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# By name of the folder: the family, the arguments of its configuration, the dtype of the weights.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}, "float32"),
    "mistral": ("Mistral", {"sliding_window": 4, "rms_norm_eps": 1e-5}, "float32"),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "float32"),
    "qwen3": ("Qwen3", {"head_dim": 6, "tie_word_embeddings": True}, "bfloat16"),
}
# The weights of this folder are in several files.
SHARDED = "llama"


def make_model(family: str, options: dict[str, Any], dtype: str = "float32", seed: int = 0) -> Any:
    """Draw a model: standard deviation 0.25, mean 1 for the scales of norms, else 0.

    It computes in float32, with weights that `dtype` can hold.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, "bos_token_id": 1, "eos_token_id": 2, **options}
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.ndim == 1), 0.25, generator=generator)
            parameter.copy_(parameter.to(getattr(torch, dtype)).float())
    return model.eval()


def draw_tokens(seed: int = 0, vocab_size: int = SIZES["vocab_size"]) -> Any:
    """Draw 2 sequences of 12 tokens, int32."""
    return np.random.default_rng(seed).integers(0, vocab_size, (2, 12)).astype(np.int32)


def logits_of(model: Any, tokens: Any) -> Any:
    """Compute the model's logits."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def save_model(model: Any, folder: Path, dtype: str = "float32", **options: Any) -> None:
    """Write a model as transformers does, its weights in `dtype`."""
    import torch

    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink()


def write_fixtures(folder: Path) -> None:
    """Write each model, and beside it tokens and logits."""
    from safetensors.numpy import save_file

    for name, (family, options, dtype) in MODELS.items():
        model, tokens = make_model(family, options, dtype), draw_tokens()
        expected = {"tokens": tokens, "logits": logits_of(model, tokens)}
        save_model(model, folder / name, dtype, max_shard_size="10KB" if name == SHARDED else "5GB")
        save_file(expected, folder / name / "expected.safetensors")


if __name__ == "__main__":
    write_fixtures(FOLDER)
