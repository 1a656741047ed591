"""Sizes and options of the transformer, and what follows from them by counting."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from fedpax.models.utilization import flops_per_token


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options of a decoder-only transformer.

    Attributes:
      vocab_size: number of tokens that there are; 256 for bytes.
      num_layers: number of layers.
      embed_dim: features of a token between layers.
      num_heads: number of query heads.
      num_kv_heads: number of key and value heads, which divides `num_heads`.
      head_dim: features of a head, even; embed_dim / num_heads by default.
      mlp_dim: features inside the feed-forward network, or inside each expert.
      feed_forward: "swiglu" has three matrices, "gelu" two, without a gate.
      num_experts: experts in each layer's mixture; 0 for one dense feed-forward network.
      num_experts_per_token: how many of them a token goes to.
      rope_base: largest wavelength of the rotary positions over 2 pi, in tokens.
      rope_scaling_factor: by what the longest wavelengths are stretched for sequences longer than
        `rope_original_seq_len`, as in Llama 3.1; None for not at all.
      rope_original_seq_len: tokens that the unstretched wavelengths were meant for.
      sliding_window: how many tokens a token sees, itself and those just before it; None for all.
      tied_embeddings: one table makes both features of tokens and logits of features; two if
        False.
      logit_softcap: logits are squeezed between -cap and cap, by cap tanh(logit / cap).
      dtype: what layers compute in. Parameters are float32 in any case, and so are norms,
        softmax and logits ("float64", for checks, needs JAX's 64-bit mode).
      quantization: the number format of the layers' matrix products in the forward pass;
        gradients stay as they are. See `fedpax.models.quantization`.
      attention: its implementation; see `fedpax.models.attention.kernels.causal_attention`.
      remat: what a layer keeps for the backward pass; see `fedpax.models.remat`.
      unroll: how many layers the scan over layers takes at once; all of them is fastest for a
        shallow model, and takes longest to compile.
      num_microbatches: parts of a batch that follow each other through a pipeline's stages.
      num_pipeline_repeats: runs of layers that a stage of a pipeline has; 1 is GPipe, more interleave.

    Raises:
      ValueError: the sizes do not fit together, or there is no such option.

    Example:
      >>> TransformerConfig(num_layers=2, embed_dim=64, num_heads=2, num_kv_heads=1).num_params()
      237888
    """

    vocab_size: int = 256
    num_layers: int = 4
    embed_dim: int = 192
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int | None = None
    mlp_dim: int = 512
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    num_experts: int = 0
    num_experts_per_token: int = 2
    rope_base: float = 10_000.0
    rope_scaling_factor: float | None = None
    rope_original_seq_len: int = 8192
    sliding_window: int | None = None
    tied_embeddings: bool = True
    logit_softcap: float | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    quantization: Literal["none", "int8", "fp8"] = "none"
    attention: Literal["auto", "einsum", "xla", "cudnn", "splash"] = "auto"
    remat: Literal[
        "none", "full", "dots", "dots_with_no_batch_dims", "save_attention", "offload"
    ] = "none"
    unroll: int = 1
    num_microbatches: int = 1
    num_pipeline_repeats: int = 1

    def __post_init__(self) -> None:
        """Checks that the sizes fit together."""
        for name, value, choices in _options(self):
            if choices and value not in choices:
                raise ValueError(
                    f"TransformerConfig.{name}={value!r}: use {_listed(map(repr, choices))}."
                )
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and (value < 0 if name == "num_experts" else value <= 0):
                raise ValueError(f"TransformerConfig.{name}={value}: expected a positive number.")
        if self.num_heads % self.num_kv_heads:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"TransformerConfig.num_kv_heads={self.num_kv_heads} does not divide "
                f"num_heads={self.num_heads}: use one of {fitting}."
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"TransformerConfig.num_heads={self.num_heads} does not divide embed_dim={self.embed_dim}: change "
                "one of them, or set head_dim."
            )
        if self.resolved_head_dim % 2:
            raise ValueError(
                f"TransformerConfig: a head has {self.resolved_head_dim} features, but rotary "
                "positions turn them in pairs: set an even head_dim."
            )
        if self.num_layers % self.num_pipeline_repeats:
            raise ValueError(
                f"TransformerConfig.num_pipeline_repeats={self.num_pipeline_repeats} does not divide "
                f"num_layers={self.num_layers}: each stage of a pipeline has as many runs of layers, all "
                "of one length. Change one of them."
            )
        if self.num_experts and self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"TransformerConfig.num_experts_per_token={self.num_experts_per_token}, but there are "
                f"num_experts={self.num_experts}: send a token to fewer, or have more of them."
            )
        if self.num_experts and self.feed_forward != "swiglu":
            raise ValueError(
                f"TransformerConfig.feed_forward={self.feed_forward!r} with "
                f"num_experts={self.num_experts}: experts have feed_forward='swiglu'."
            )

    @property
    def resolved_head_dim(self) -> int:
        """`head_dim`, or what follows from embed_dim and num_heads."""
        return self.head_dim or self.embed_dim // self.num_heads

    def num_params(self) -> int:
        """Counts the parameters, each of tied embeddings once."""
        tables = 1 if self.tied_embeddings else 2
        layer = self._outside_experts() + max(1, self.num_experts) * self._feed_forward()
        return tables * self.vocab_size * self.embed_dim + self.num_layers * layer + self.embed_dim

    def num_active_params(self) -> int:
        """Counts the parameters that a token meets: of a mixture, `num_experts_per_token` experts.

        Example:
          >>> config = TransformerConfig(num_experts=8, num_experts_per_token=2)
          >>> (config.num_params() - config.num_active_params()) // config.num_layers  # 6 experts
          1769472
        """
        idle = max(0, self.num_experts - self.num_experts_per_token)
        return self.num_params() - self.num_layers * idle * self._feed_forward()

    def flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Counts the floating-point operations of one token in a training step.

        6 N + 12 num_layers num_heads head_dim seq_len, where N are the active parameters without a table
        that tokens are only looked up in: with tied embeddings the table counts, for it makes the
        logits too. A multiplication and an addition count as two, the backward pass as twice the
        forward pass, and rematerialization, which is the program's own choice, not at all.

        Args:
          seq_len: tokens in a sequence. A token attends to all of them, by the convention that
            published figures follow, or to as many as the window has.
          causal: count only those at and before a token, half of the sequence on average (less
            what lies before the window).

        Returns:
          Operations a token.

        Example:
          >>> config = TransformerConfig(vocab_size=256, num_layers=4, embed_dim=192, num_heads=3)
          >>> config.flops_per_token(1024) / (6 * config.num_params() + 12 * 4 * 192 * 1024)
          1.0

        Reference: Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B.
        """
        seen = min(seq_len, self.sliding_window or seq_len)
        # Token t sees min(t, seen); the sum over t is seen * seq_len - seen^2 / 2.
        attended = seen * (1 - seen / (2 * seq_len)) if causal else seen
        looked_up = 0 if self.tied_embeddings else self.vocab_size * self.embed_dim
        return flops_per_token(
            self.num_active_params() - looked_up,
            self.num_layers,
            self.num_heads,
            self.resolved_head_dim,
            attended,
        )

    def _outside_experts(self) -> int:
        """Parameters of a layer's attention, norms and router."""
        attention = (
            self.embed_dim * self.resolved_head_dim * 2 * (self.num_heads + self.num_kv_heads)
        )
        return attention + 2 * self.embed_dim + self.embed_dim * self.num_experts

    def _feed_forward(self) -> int:
        """Parameters of a feed-forward network, or of one expert."""
        return (3 if self.feed_forward == "swiglu" else 2) * self.embed_dim * self.mlp_dim


def _options(config: TransformerConfig) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Name and value of each field, and what it may be where the type lists that."""
    hints = get_type_hints(TransformerConfig)
    listed = {name: get_args(hint) for name, hint in hints.items()}
    return [
        (
            field.name,
            getattr(config, field.name),
            listed[field.name] if isinstance(field.default, str) else (),
        )
        for field in dataclasses.fields(config)
    ]


def _listed(words: Any) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}"
