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
      vocabulary: number of tokens that there are; 256 for bytes.
      layers: number of layers.
      width: features of a token between layers.
      heads: number of query heads.
      key_value_heads: number of key and value heads, which divides `heads`.
      head_width: features of a head, even; width / heads by default.
      mlp_width: features inside the feed-forward network, or inside each expert.
      feed_forward: "swiglu" has three matrices, "gelu" two, without a gate.
      experts: experts in each layer's mixture; 0 for one dense feed-forward network.
      experts_per_token: how many of them a token goes to.
      rope_base: largest wavelength of the rotary positions over 2 pi, in tokens.
      rope_scaling: by what the longest wavelengths are stretched for sequences longer than
        `rope_length`, as in Llama 3.1; None for not at all.
      rope_length: tokens that the unstretched wavelengths were meant for.
      window: how many tokens a token sees, itself and those just before it; None for all.
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
      microbatches: parts of a batch that follow each other through a pipeline's stages.
      stage_repeats: runs of layers that a stage of a pipeline has; 1 is GPipe, more interleave.

    Raises:
      ValueError: the sizes do not fit together, or there is no such option.

    Example:
      >>> TransformerConfig(layers=2, width=64, heads=2, key_value_heads=1).parameters()
      237888
    """

    vocabulary: int = 256
    layers: int = 4
    width: int = 192
    heads: int = 3
    key_value_heads: int = 1
    head_width: int | None = None
    mlp_width: int = 512
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    experts: int = 0
    experts_per_token: int = 2
    rope_base: float = 10_000.0
    rope_scaling: float | None = None
    rope_length: int = 8192
    window: int | None = None
    tied_embeddings: bool = True
    logit_softcap: float | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    quantization: Literal["none", "int8", "fp8"] = "none"
    attention: Literal["auto", "einsum", "xla", "cudnn", "splash"] = "auto"
    remat: Literal[
        "none", "full", "dots", "dots_with_no_batch_dims", "save_attention", "offload"
    ] = "none"
    unroll: int = 1
    microbatches: int = 1
    stage_repeats: int = 1

    def __post_init__(self) -> None:
        """Checks that the sizes fit together."""
        for name, value, choices in _options(self):
            if choices and value not in choices:
                raise ValueError(
                    f"TransformerConfig.{name}={value!r}: use {_listed(map(repr, choices))}."
                )
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and (value < 0 if name == "experts" else value <= 0):
                raise ValueError(f"TransformerConfig.{name}={value}: expected a positive number.")
        if self.heads % self.key_value_heads:
            fitting = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"TransformerConfig.key_value_heads={self.key_value_heads} does not divide "
                f"heads={self.heads}: use one of {fitting}."
            )
        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"TransformerConfig.heads={self.heads} does not divide width={self.width}: change "
                "one of them, or set head_width."
            )
        if self.features_per_head % 2:
            raise ValueError(
                f"TransformerConfig: a head has {self.features_per_head} features, but rotary "
                "positions turn them in pairs: set an even head_width."
            )
        if self.layers % self.stage_repeats:
            raise ValueError(
                f"TransformerConfig.stage_repeats={self.stage_repeats} does not divide "
                f"layers={self.layers}: each stage of a pipeline has as many runs of layers, all "
                "of one length. Change one of them."
            )
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"TransformerConfig.experts_per_token={self.experts_per_token}, but there are "
                f"experts={self.experts}: send a token to fewer, or have more of them."
            )
        if self.experts and self.feed_forward != "swiglu":
            raise ValueError(
                f"TransformerConfig.feed_forward={self.feed_forward!r} with "
                f"experts={self.experts}: experts have feed_forward='swiglu'."
            )

    @property
    def features_per_head(self) -> int:
        """`head_width`, or what follows from width and heads."""
        return self.head_width or self.width // self.heads

    def parameters(self) -> int:
        """Counts the parameters, each of tied embeddings once."""
        tables = 1 if self.tied_embeddings else 2
        layer = self._outside_experts() + max(1, self.experts) * self._feed_forward()
        return tables * self.vocabulary * self.width + self.layers * layer + self.width

    def active_parameters(self) -> int:
        """Counts the parameters that a token meets: of a mixture, `experts_per_token` experts.

        Example:
          >>> config = TransformerConfig(experts=8, experts_per_token=2)
          >>> (config.parameters() - config.active_parameters()) // config.layers  # 6 experts
          1769472
        """
        idle = max(0, self.experts - self.experts_per_token)
        return self.parameters() - self.layers * idle * self._feed_forward()

    def flops_per_token(self, length: int, causal: bool = False) -> float:
        """Counts the floating-point operations of one token in a training step.

        6 N + 12 layers heads head_width length, where N are the active parameters without a table
        that tokens are only looked up in: with tied embeddings the table counts, for it makes the
        logits too. A multiplication and an addition count as two, the backward pass as twice the
        forward pass, and rematerialization, which is the program's own choice, not at all.

        Args:
          length: tokens in a sequence. A token attends to all of them, by the convention that
            published figures follow, or to as many as the window has.
          causal: count only those at and before a token, half of the sequence on average (less
            what lies before the window).

        Returns:
          Operations a token.

        Example:
          >>> config = TransformerConfig(vocabulary=256, layers=4, width=192, heads=3)
          >>> config.flops_per_token(1024) / (6 * config.parameters() + 12 * 4 * 192 * 1024)
          1.0

        Reference: Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B.
        """
        seen = min(length, self.window or length)
        # Token t sees min(t, seen); the sum over t is seen * length - seen^2 / 2.
        attended = seen * (1 - seen / (2 * length)) if causal else seen
        looked_up = 0 if self.tied_embeddings else self.vocabulary * self.width
        return flops_per_token(
            self.active_parameters() - looked_up,
            self.layers,
            self.heads,
            self.features_per_head,
            attended,
        )

    def _outside_experts(self) -> int:
        """Parameters of a layer's attention, norms and router."""
        attention = self.width * self.features_per_head * 2 * (self.heads + self.key_value_heads)
        return attention + 2 * self.width + self.width * self.experts

    def _feed_forward(self) -> int:
        """Parameters of a feed-forward network, or of one expert."""
        return (3 if self.feed_forward == "swiglu" else 2) * self.width * self.mlp_width


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
