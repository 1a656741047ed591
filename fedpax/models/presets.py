"""Configurations of known transformers, one function each.

A variant is `dataclasses.replace(preset(), ...)`.
"""

from __future__ import annotations

from fedpax.models.transformer_config import TransformerConfig

__all__ = [
    "base_1m",
    "base_100k",
    "base_100m",
    "llama_3_1_8b",
    "llama_3_1_70b",
    "mixtral_8x7b",
    "pax_c4_1b",
    "pax_c4_16b",
]


def base_100k() -> TransformerConfig:
    """Return the byte-level transformer of the experiment `diloco_text`: 0.1 million parameters."""
    return TransformerConfig(
        vocab_size=256,
        num_layers=2,
        embed_dim=64,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=160,
        rope_base=50.0,
        unroll=2,
    )


def base_1m() -> TransformerConfig:
    """Return the byte-level transformer of `pretrain_text`: 1.1 million parameters."""
    return TransformerConfig(
        vocab_size=256,
        num_layers=3,
        embed_dim=192,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=416,
        rope_base=50.0,
        unroll=3,
    )


def base_100m() -> TransformerConfig:
    """Return a transformer of 100 million parameters: days on a CPU, minutes to hours on a GPU."""
    return TransformerConfig(
        vocab_size=32_000,
        num_layers=12,
        embed_dim=768,
        num_heads=12,
        num_kv_heads=12,
        mlp_dim=1792,
        dtype="bfloat16",
    )


def pax_c4_1b() -> TransformerConfig:
    """Return the sizes of Pax's experiment C4Spmd1BAdam4Replicas: 1.1 billion parameters.

    Unlike in Pax, positions are rotary, norms are RMSNorm, and the scores of attention have no cap.
    """
    return _pax(num_layers=13, embed_dim=2560, num_heads=20)


def pax_c4_16b() -> TransformerConfig:
    """Return the sizes of Pax's experiment C4Spmd16BAdam32Replicas: 16.5 billion parameters."""
    return _pax(num_layers=36, embed_dim=6144, num_heads=48)


def _pax(num_layers: int, embed_dim: int, num_heads: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=32_000,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=128,
        mlp_dim=4 * embed_dim,
        feed_forward="gelu",
        logit_softcap=30.0,
        dtype="bfloat16",
        remat="full",
    )


def llama_3_1_8b() -> TransformerConfig:
    """Return Llama 3.1 8B: 8.03 billion parameters.

    Reference:
        Grattafiori et al. (arXiv:2407.21783), table 3.
    """
    return _llama(num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=14_336)


def llama_3_1_70b() -> TransformerConfig:
    """Return Llama 3.1 70B: 70.6 billion parameters.

    Reference:
        Grattafiori et al. (arXiv:2407.21783), table 3.
    """
    return _llama(num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28_672)


def _llama(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=128_256,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=8,
        mlp_dim=mlp_dim,
        rope_base=500_000.0,
        rope_scaling_factor=8.0,
        norm_eps=1e-5,
        tied_embeddings=False,
        scale_embeddings=False,
        dtype="bfloat16",
        remat="full",
    )


def mixtral_8x7b() -> TransformerConfig:
    """Return Mixtral 8x7B: 46.7 billion parameters, of which a token uses 12.9 billion.

    Reference:
        Jiang et al. (arXiv:2401.04088), table 1.
    """
    return TransformerConfig(
        vocab_size=32_000,
        num_layers=32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=14_336,
        num_experts=8,
        num_experts_per_token=2,
        rope_base=1_000_000.0,
        norm_eps=1e-5,
        tied_embeddings=False,
        scale_embeddings=False,
        dtype="bfloat16",
        remat="full",
    )
