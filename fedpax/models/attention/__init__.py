"""Attention: the layer, causal attention by several implementations, ring and splash attention."""

from fedpax.models.attention.causal import Implementation, causal_attention
from fedpax.ops.ring_attention import ring_attention
from fedpax.ops.splash_attention import splash_attention

__all__ = ["Implementation", "causal_attention", "ring_attention", "splash_attention"]
