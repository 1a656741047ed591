"""Configuration of the transformer; counts of its parameters and floating-point operations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from fedpax.errors import ArgumentError


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options of a decoder-only transformer.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        num_layers: number of layers.
        embed_dim: features of a token between layers.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of `num_heads`.
        head_dim: features per head, even. Default None: embed_dim / num_heads.
        mlp_dim: hidden features of the feed-forward network, or of an expert.
        feed_forward: "swiglu" with three matrices, or "gelu" (tanh formula) with two and no gate.
        num_experts: experts per layer in a mixture. Default 0: one dense feed-forward network.
        num_experts_per_token: number of experts that a token goes through. As in Mixtral, their
            weights add up to 1. With 1 expert, the routing losses alone train the router.
        norm_eps: epsilon of RMSNorm. Default 1e-6; Llama 3, Mistral and Mixtral use 1e-5.
        qk_norm: whether RMSNorm normalizes each head of queries and keys (QK-Norm), as in Qwen3.
        rope_base: base of the rotary positions: the longest wavelength, in tokens, over 2 pi.
        rope_scaling_factor: stretches the longest wavelengths, for sequences longer than
            `rope_original_seq_len`, as in Llama 3.1. Default None: no stretching.
        rope_original_seq_len: sequence length for which the unstretched wavelengths were chosen.
        sliding_window: number of tokens that a token attends to, itself included. Default None: all
            earlier tokens.
        tied_embeddings: whether one table is both the embedding and the output projection.
        scale_embeddings: whether embeddings are multiplied by sqrt(embed_dim), as in Pax and Gemma.
        logit_softcap: replaces each logit by cap tanh(logit / cap). Default None: no cap.
        dtype: compute dtype of the layers. Parameters are float32; norms, softmax and logits are
            computed in float32 at least. "float64" needs JAX's 64-bit mode.
        quantization: number format of the layers' matmuls in the forward pass; see
            `fedpax.ops.quantization`.
        attention: implementation; see `fedpax.models.attention.causal_attention`.
        remat: what a layer stores for the backward pass; see `fedpax.ops.remat`.
        unroll: layers per iteration of the scan over layers; a larger number compiles longer.
        num_microbatches: microbatches of a batch in a pipeline (mesh axis `stage`).
        num_pipeline_repeats: blocks of consecutive layers per pipeline stage. 1 is GPipe; more
            interleave the stages.

        weights: the Hugging Face folder that an experiment on text begins from. Models themselves
            ignore it. Default None: random parameters. Adapters (`lora.rank` above 0) need a
            folder.

    Raises:
        ValueError: the sizes do not fit together, or an option does not exist.

    Reference:
        Vaswani et al., arXiv:1706.03762, section 3.4, for `scale_embeddings`.

    Example:
        >>> TransformerConfig(
        ...     num_layers=2, embed_dim=64, num_heads=2, num_kv_heads=1
        ... ).num_params()
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
    norm_eps: float = 1e-6
    qk_norm: bool = False
    rope_base: float = 10_000.0
    rope_scaling_factor: float | None = None
    rope_original_seq_len: int = 8192
    sliding_window: int | None = None
    tied_embeddings: bool = True
    scale_embeddings: bool = True
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
    weights: str | None = None

    def __post_init__(self) -> None:
        """Check that the sizes fit together."""
        for name, value, choices in _options(self):
            if choices and value not in choices:
                *most, last = map(repr, choices)
                raise ArgumentError(
                    f"TransformerConfig.{name}={value!r}: use {', '.join(most)} or {last}."
                )
            number = isinstance(value, int | float) and not isinstance(value, bool)
            # Negated comparisons: NaN raises too.
            if number and not (value >= 0 if name == "num_experts" else value > 0):
                raise ArgumentError(
                    f"TransformerConfig.{name}={value}: expected a positive number."
                )
        if self.num_heads % self.num_kv_heads:
            few = range(1, min(self.num_heads, 1024) + 1)  # a file can say any number
            divisors = [n for n in few if self.num_heads % n == 0]
            raise ArgumentError(
                f"TransformerConfig.num_kv_heads={self.num_kv_heads} does not divide "
                f"num_heads={self.num_heads}: use one of {divisors}."
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ArgumentError(
                f"TransformerConfig.num_heads={self.num_heads} does not divide "
                f"embed_dim={self.embed_dim}: change one of them, or set head_dim."
            )
        if self.resolved_head_dim % 2:
            raise ArgumentError(
                f"TransformerConfig: a head has {self.resolved_head_dim} features, but rotary "
                "positions rotate pairs of features: set an even head_dim."
            )
        if self.num_layers % self.num_pipeline_repeats:
            raise ArgumentError(
                f"TransformerConfig.num_pipeline_repeats={self.num_pipeline_repeats} does not "
                f"divide num_layers={self.num_layers}: all blocks of layers in a pipeline have the "
                "same length. Change one of them."
            )
        if self.num_experts and self.num_experts_per_token > self.num_experts:
            raise ArgumentError(
                f"TransformerConfig.num_experts_per_token={self.num_experts_per_token}, but there "
                f"are num_experts={self.num_experts}: expected at most {self.num_experts}."
            )
        if self.num_experts and self.feed_forward != "swiglu":
            raise ArgumentError(
                f"TransformerConfig.feed_forward={self.feed_forward!r} with "
                f"num_experts={self.num_experts}: experts need feed_forward='swiglu'."
            )

    @property
    def resolved_head_dim(self) -> int:
        """`head_dim`, or embed_dim / num_heads if that is None."""
        return self.head_dim or self.embed_dim // self.num_heads

    def num_params(self) -> int:
        """Count the parameters; a tied embedding table counts once."""
        tables = 1 if self.tied_embeddings else 2
        layer = self._outside_experts() + max(1, self.num_experts) * self._feed_forward()
        return tables * self.vocab_size * self.embed_dim + self.num_layers * layer + self.embed_dim

    def num_active_params(self) -> int:
        """Count the parameters that one token uses: of a mixture, the experts of one token."""
        idle = max(0, self.num_experts - self.num_experts_per_token)
        return self.num_params() - self.num_layers * idle * self._feed_forward()

    def flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Count the floating-point operations of one token in a training step.

        6 N + 12 num_layers num_heads head_dim seq_len, where N are the active parameters in
        matmuls and norms, a tied embedding table included. Rematerialization does not count.

        Args:
            seq_len: tokens in a sequence.
            causal: False, the convention of published figures, counts all `seq_len` keys for each
                token, or `sliding_window`. True counts only those at and before a token.

        Example:
            >>> config = TransformerConfig(vocab_size=256, num_layers=4, embed_dim=192, num_heads=3)
            >>> config.flops_per_token(1024) / (6 * config.num_params() + 12 * 4 * 192 * 1024)
            1.0

        Reference:
            Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B.
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
        """Count the parameters of a layer's attention, norms and router."""
        attention = (
            self.embed_dim * self.resolved_head_dim * 2 * (self.num_heads + self.num_kv_heads)
        )
        norms = 2 * self.embed_dim + (2 * self.resolved_head_dim if self.qk_norm else 0)
        return attention + norms + self.embed_dim * self.num_experts

    def _feed_forward(self) -> int:
        """Count the parameters of a feed-forward network, or of one expert."""
        return (3 if self.feed_forward == "swiglu" else 2) * self.embed_dim * self.mlp_dim


def _options(config: TransformerConfig) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Return name, value and allowed values of each field; () where the type does not list them."""
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


# ---- model FLOPs utilization (MFU): the fraction of the chips' peak FLOP/s that the model uses
#
# MFU counts the matmuls of the model, forward and backward, without recomputation. Two conventions
# for attention cannot be compared: all query-key pairs (PaLM, MaxText), or only the pairs that the
# causal mask leaves.


def flops_per_token(
    num_params: float,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    seq_len: float,
    causal: bool = False,
) -> float:
    """Count the floating-point operations of a transformer for one training token.

    6 N + 12 L H d T, the backward pass as twice the forward pass.

    Args:
        num_params: N, the parameters in matmuls and norms; of a mixture of experts, those that one
            token uses.
        num_layers: L.
        num_heads: H, query heads.
        head_dim: d, features per head.
        seq_len: T, tokens in a sequence, or the mean number of tokens that a token attends to.
        causal: count only the half of attention that a causal mask leaves, 6 L H d T.

    Example:
        >>> f"{flops_per_token(540.35e9, 118, 48, 256, 2048):.4g}"  # PaLM 540B
        '3.278e+12'
    """
    attention = (6 if causal else 12) * num_layers * num_heads * head_dim * seq_len
    return 6 * num_params + attention


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, num_chips: int, peak_flops_per_chip: float
) -> float:
    """Return the fraction of the chips' peak FLOP/s that training uses.

    Args:
        tokens_per_second: throughput of all chips together.
        flops_per_token: see `flops_per_token`.
        num_chips: number of chips.
        peak_flops_per_chip: peak FLOP/s of one chip in the dtype of the matmuls.

    Example:
        >>> flops = flops_per_token(540.35e9, 118, 48, 256, 2048)
        >>> f"{model_flops_utilization(238.3e3, flops, 6144, 275e12):.1%}"  # PaLM's own figure
        '46.2%'
    """
    return tokens_per_second * flops_per_token / (num_chips * peak_flops_per_chip)
