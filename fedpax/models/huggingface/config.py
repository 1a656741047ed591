"""Conversion between config.json and `TransformerConfig`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from fedpax.errors import ArgumentError
from fedpax.models.transformer_config import TransformerConfig

Entries: TypeAlias = Mapping[str, Any]


class Family(NamedTuple):
    """A model family of transformers."""

    architecture: str  # name of the class in transformers
    num_kv_heads: int | None  # default of num_key_value_heads. None: num_attention_heads
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0
    head_dim: int | None = None  # default of head_dim. None: hidden_size / num_attention_heads
    sliding_window: int | None = None


# By model_type. transformers has the same defaults for entries that config.json leaves out.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", None),
    "mistral": Family("MistralForCausalLM", 8, sliding_window=4096),
    "mixtral": Family("MixtralForCausalLM", 8, norm_eps=1e-5, rope_base=1e6),
    "qwen3": Family("Qwen3ForCausalLM", 32, head_dim=128, sliding_window=4096),
}
# Entries of config.json that change the model's results, and the values that the transformer has.
SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "router_jitter_noise": (0,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "tie_word_embeddings": (True, False, None),
    "use_sliding_window": (True, False, None),
}
# Fields of TransformerConfig that the four families fix.
SUPPORTED_FIELDS: Mapping[str, Any] = {
    "feed_forward": "swiglu",
    "scale_embeddings": False,
    "logit_softcap": None,
}
# Fields of TransformerConfig that do not change what a model is, only how it is computed.
EXECUTION_FIELDS = frozenset(
    {
        "dtype",
        "quantization",
        "attention",
        "remat",
        "unroll",
        "num_microbatches",
        "num_pipeline_repeats",
        "weights",
    }
)
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Boundaries of Llama 3.1's rotary scaling, which `fedpax.models.attention.causal.rotary` fixes.
_MOST = 2**31 - 1  # of the integers that JAX computes with
LLAMA3_ROPE: Mapping[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def from_entries(entries: Entries, source: str) -> TransformerConfig:
    """Convert the entries of config.json; `dtype` is theirs, float32 in place of float16."""
    read = _ConfigEntries(entries, source)
    model_type = entries.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise read.unsupported("model_type", f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    architectures = entries.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise read.unsupported("architectures", f"['{family.architecture}']")
    for name, values in SUPPORTED_VALUES.items():
        if name in entries and entries[name] not in values:
            raise read.unsupported(name, " or ".join(map(repr, values)))
    dtype = entries.get("dtype", entries.get("torch_dtype")) or "float32"
    if dtype not in DTYPES:
        raise read.unsupported("dtype" if "dtype" in entries else "torch_dtype", ", ".join(DTYPES))

    embed_dim, num_heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    head_dim = read.integer("head_dim", family.head_dim or 0)
    is_mixture = model_type == "mixtral"
    fields = {
        "vocab_size": read.integer("vocab_size"),
        "num_layers": read.integer("num_hidden_layers"),
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": read.integer("num_key_value_heads", family.num_kv_heads or num_heads),
        "head_dim": head_dim if head_dim and head_dim * num_heads != embed_dim else None,
        "mlp_dim": read.integer("intermediate_size"),
        "num_experts": read.integer("num_local_experts", 8) if is_mixture else 0,
        "num_experts_per_token": read.integer("num_experts_per_tok", 2) if is_mixture else 2,
        "norm_eps": read.number("rms_norm_eps", family.norm_eps),
        "qk_norm": model_type == "qwen3",
        "sliding_window": _sliding_window(read, model_type),
        "tied_embeddings": bool(entries.get("tie_word_embeddings", False)),
        "scale_embeddings": False,
        # The transformer does not compute in float16, whose range is too small for training.
        "dtype": "float32" if dtype == "float16" else dtype,
        **_rope_fields(read, family),
    }
    try:
        return TransformerConfig(**fields)
    except ValueError as error:
        raise ArgumentError(f"{source}: {error}") from None


def to_entries(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Convert a configuration to the entries of config.json."""
    # mixtral has experts, qwen3 QK-Norm, mistral a sliding window; else llama.
    for name, value in SUPPORTED_FIELDS.items():
        if getattr(config, name) != value:
            raise ArgumentError(
                f"TransformerConfig.{name}={getattr(config, name)!r}: no supported Hugging Face "
                f"family ({', '.join(FAMILIES)}) has this. Only {name}={value!r} can be saved."
            )
    if config.qk_norm and config.num_experts:
        raise ArgumentError(
            f"TransformerConfig.qk_norm=True with num_experts={config.num_experts}: qwen3 has "
            "QK-Norm and mixtral has experts, but no supported Hugging Face family has both. "
            "Set qk_norm=False or num_experts=0."
        )
    window = config.sliding_window
    model_type = (
        "mixtral"
        if config.num_experts
        else "qwen3"
        if config.qk_norm
        else "mistral"
        if window is not None
        else "llama"
    )
    entries = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.resolved_head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": 0.0,
        # The tokenizer decides about them, and the transformer has none.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **_rope_entries(config),
        **dtype_entries(dtype),
    }
    if model_type in ("llama", "qwen3"):
        entries["attention_bias"] = False
    if model_type == "llama":
        entries["mlp_bias"] = False
    else:
        entries["sliding_window"] = window
    if model_type == "qwen3":
        layer_type = "full_attention" if window is None else "sliding_attention"
        entries["use_sliding_window"] = window is not None
        entries["max_window_layers"] = config.num_layers if window is None else 0
        entries["layer_types"] = [layer_type] * config.num_layers
    if model_type == "mixtral":
        entries["num_local_experts"] = config.num_experts
        entries["num_experts_per_tok"] = config.num_experts_per_token
    return entries


def dtype_entries(dtype: str) -> dict[str, str]:
    """Return the entries for a dtype: `dtype` for transformers 5, `torch_dtype` for version 4."""
    return {"dtype": dtype, "torch_dtype": dtype}


def differing_fields(first: TransformerConfig, second: TransformerConfig) -> list[str]:
    """Name the fields in which two configurations describe different models."""
    first, second = (_without_ineffective(config) for config in (first, second))
    return [
        field.name
        for field in dataclasses.fields(TransformerConfig)
        if field.name not in EXECUTION_FIELDS
        and getattr(first, field.name) != getattr(second, field.name)
    ]


def _without_ineffective(config: TransformerConfig) -> TransformerConfig:
    """Reset the fields that other fields leave without effect; write `head_dim` in full."""
    changes: dict[str, Any] = {"head_dim": config.resolved_head_dim}
    if config.rope_scaling_factor is None:
        changes["rope_original_seq_len"] = TransformerConfig.rope_original_seq_len
    if not config.num_experts:
        changes["num_experts_per_token"] = TransformerConfig.num_experts_per_token
    return dataclasses.replace(config, **changes)


class _ConfigEntries(NamedTuple):
    """Entries of a file, with messages that name the file."""

    entries: Entries
    source: str

    def unsupported(self, name: str, supported: str) -> ValueError:
        value = self.entries.get(name)
        return ArgumentError(
            f"{self.source}: {name}={value!r} is not supported: expected {supported}."
        )

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer; `default` where the entry is missing or null."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentError(f"{self.source}: {name}={value!r}: expected an integer.")
        if not -_MOST <= value <= _MOST:
            raise ArgumentError(f"{self.source}: {name}={value}: expected at most {_MOST}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number as a float; `default` where the entry is missing or null."""
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ArgumentError(f"{self.source}: {name}={value!r}: expected a finite number.")
        return float(value)

    def _get(self, name: str, default: float | None) -> Any:
        value = self.entries.get(name)
        value = default if value is None else value
        if value is None:
            raise ArgumentError(f"{self.source}: the entry {name} is missing.")
        return value


def _sliding_window(read: _ConfigEntries, model_type: str) -> int | None:
    entries = read.entries
    if model_type == "llama" or (model_type == "qwen3" and not entries.get("use_sliding_window")):
        window = None
    elif "sliding_window" in entries and entries["sliding_window"] is None:
        window = None  # null is not the default
    else:
        default = FAMILIES[model_type].sliding_window
        has_window = "sliding_window" in entries or default is not None
        window = read.integer("sliding_window", default) if has_window else None
    if model_type != "qwen3":
        return window
    num_layers = read.integer("num_hidden_layers")
    first = read.integer("max_window_layers", 28) if window is not None else num_layers
    kinds = entries.get("layer_types")
    if kinds and not isinstance(kinds, list):
        raise read.unsupported("layer_types", "a list with an entry for each layer")
    if not kinds:  # in this form, no list as long as the file says is made
        kinds = ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < num_layers)
    elif len(kinds) != num_layers:
        raise ArgumentError(
            f"{read.source}: num_hidden_layers={num_layers}, but layer_types has {len(kinds)} "
            "entries: expected one for each layer."
        )
    kinds = sorted(set(map(str, kinds)))
    if kinds == ["full_attention"]:
        return None
    if kinds == ["sliding_attention"] and window is not None:
        return window
    raise ArgumentError(
        f"{read.source}: layer_types={kinds} with use_sliding_window="
        f"{entries.get('use_sliding_window')!r} and sliding_window={window!r} is not "
        "supported: expected the same attention in all layers, 'full_attention' without a sliding "
        "window or 'sliding_attention' with one."
    )


def _rope_fields(read: _ConfigEntries, family: Family) -> dict[str, Any]:
    """Convert the rotary positions: `rope_parameters` of transformers 5, `rope_theta` before."""
    entries = read.entries
    name = "rope_scaling" if entries.get("rope_scaling") else "rope_parameters"
    rope = entries.get(name) or {}
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        raise read.unsupported(name, "one object of numbers for all layers")
    inner = _ConfigEntries(rope, f"{read.source}, {name}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ArgumentError(
            f"{inner.source}: rope_type={rope_type!r} is not supported: expected "
            "'default' or 'llama3'."
        )
    if rope.get("partial_rotary_factor", 1) not in SUPPORTED_VALUES["partial_rotary_factor"]:
        raise inner.unsupported("partial_rotary_factor", "1")
    longest = read.integer("max_position_embeddings", TransformerConfig.rope_original_seq_len)
    fields = {
        "rope_base": inner.number("rope_theta", read.number("rope_theta", family.rope_base)),
        "rope_original_seq_len": longest,
    }
    if rope_type == "default":
        return fields
    for boundary, value in LLAMA3_ROPE.items():
        if inner.number(boundary) != value:
            raise inner.unsupported(boundary, f"{value}, as in Llama 3.1, 3.2 and 3.3")
    length = "original_max_position_embeddings"
    return fields | {
        "rope_scaling_factor": inner.number("factor"),
        "rope_original_seq_len": read.integer(length, inner.integer(length, longest)),
    }


def _rope_entries(config: TransformerConfig) -> dict[str, Any]:
    """Write the rotary positions for transformers 5 and for version 4."""
    factor, length = config.rope_scaling_factor, config.rope_original_seq_len
    scaling: dict[str, Any] | None = None
    if factor is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            **LLAMA3_ROPE,
            "original_max_position_embeddings": length,
        }
    return {
        "max_position_embeddings": int(length * (factor or 1)),
        "rope_theta": config.rope_base,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_theta": config.rope_base,
            **(scaling or {"rope_type": "default"}),
        },
    }
