"""Attention: the layer, causal attention by several implementations, ring and splash attention."""

from fedpax.models.attention.kernels import Implementation, causal_attention
from fedpax.models.attention.layer import (
    Attend,
    Attention,
    attend,
    attention_mask,
    rotary,
    rotate,
    visible,
)
from fedpax.models.attention.ring import ring_attention
from fedpax.models.attention.splash import splash_attention, splash_supports

__all__ = [
    "Attend",
    "Attention",
    "Implementation",
    "attend",
    "attention_mask",
    "causal_attention",
    "ring_attention",
    "rotary",
    "rotate",
    "splash_attention",
    "splash_supports",
    "visible",
]
