"""Attention: the layer, causal attention by several implementations, ring and splash attention."""

from fedpax.models.attention.causal import Implementation, causal_attention
from fedpax.models.attention.layer import (
    Attention,
    AttentionFn,
    attention_mask,
    masked_attention,
    rotary,
    rotate,
    visible,
)
from fedpax.models.attention.ring_attention import ring_attention
from fedpax.models.attention.splash import splash_attention, splash_supports

__all__ = [
    "Attention",
    "AttentionFn",
    "Implementation",
    "attention_mask",
    "causal_attention",
    "masked_attention",
    "ring_attention",
    "rotary",
    "rotate",
    "splash_attention",
    "splash_supports",
    "visible",
]
