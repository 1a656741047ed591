"""Transformers of known sizes, each a function that returns its configuration.

A variant is `dataclasses.replace(preset(), ...)`.
"""

from __future__ import annotations

from fedpax.models.transformer_config import TransformerConfig


def demo() -> TransformerConfig:
    """The byte-level transformer of the experiment `diloco_text`, about a million parameters."""
    return TransformerConfig(
        vocabulary=256,
        layers=3,
        width=192,
        heads=4,
        key_value_heads=2,
        mlp_width=416,
        rope_base=50.0,
        unroll=3,
    )


def base_100m() -> TransformerConfig:
    """100 million parameters: what a CPU trains in days and a GPU in minutes to hours."""
    return TransformerConfig(
        vocabulary=32_000,
        layers=12,
        width=768,
        heads=12,
        key_value_heads=12,
        mlp_width=1792,
        dtype="bfloat16",
    )


def pax_c4_1b() -> TransformerConfig:
    """The sizes of Pax's experiment C4Spmd1BAdam4Replicas: 1.1 billion parameters.

    As there, embeddings are tied, logits capped at 30, and layers computed again in the backward
    pass. Positions are rotary here and sinusoids there; Pax also caps attention's scores at 50.
    """
    return _pax(layers=13, width=2560, heads=20)


def pax_c4_16b() -> TransformerConfig:
    """The sizes of Pax's experiment C4Spmd16BAdam32Replicas: 16.5 billion parameters.

    What `pax_c4_1b` tells of likeness and difference holds here too.
    """
    return _pax(layers=36, width=6144, heads=48)


def _pax(layers: int, width: int, heads: int) -> TransformerConfig:
    return TransformerConfig(
        vocabulary=32_000,
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=heads,
        head_width=128,
        mlp_width=4 * width,
        feed_forward="gelu",
        logit_softcap=30.0,
        dtype="bfloat16",
        remat="full",
    )


def llama_3_1_8b() -> TransformerConfig:
    """Llama 3.1 8B: 8.03 billion parameters.

    Reference: Grattafiori et al., "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3.
    """
    return _llama(layers=32, width=4096, heads=32, mlp_width=14_336)


def llama_3_1_70b() -> TransformerConfig:
    """Llama 3.1 70B: 70.6 billion parameters.

    Reference: Grattafiori et al., "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3.
    """
    return _llama(layers=80, width=8192, heads=64, mlp_width=28_672)


def _llama(layers: int, width: int, heads: int, mlp_width: int) -> TransformerConfig:
    return TransformerConfig(
        vocabulary=128_256,
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=8,
        mlp_width=mlp_width,
        rope_base=500_000.0,
        rope_scaling=8.0,
        tied_embeddings=False,
        dtype="bfloat16",
        remat="full",
    )


def mixtral_8x7b() -> TransformerConfig:
    """The sizes of Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9 billion.

    Reference: Jiang et al., "Mixtral of Experts" (arXiv:2401.04088), table 1.
    """
    return TransformerConfig(
        vocabulary=32_000,
        layers=32,
        width=4096,
        heads=32,
        key_value_heads=8,
        mlp_width=14_336,
        experts=8,
        experts_per_token=2,
        rope_base=1_000_000.0,
        tied_embeddings=False,
        dtype="bfloat16",
        remat="full",
    )
