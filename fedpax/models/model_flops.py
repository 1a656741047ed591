"""Model FLOPs utilization (MFU): the fraction of the chips' peak FLOP/s that the model uses.

MFU counts the matmuls of the model, forward and backward, without recomputation. There are two
conventions for attention, and their results cannot be compared: all query-key pairs, including the
half that a causal mask hides (PaLM, MaxText), or only the pairs that the causal mask leaves.

Reference:
    Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B.
"""

from __future__ import annotations


def flops_per_token(
    num_params: float,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    seq_len: float,
    causal: bool = False,
) -> float:
    """Count the floating-point operations of a transformer for one training token.

    6 N + 12 L H d T: two operations per parameter and token in the forward pass, four in the
    backward pass, and the same for the scores of attention and their matmul with the values.

    Args:
        num_params: N, the parameters that take part in a matmul: without an embedding table that
            is only looked up; for a mixture of experts, the parameters that one token uses.
        num_layers: L.
        num_heads: H, query heads.
        head_dim: d, features per head.
        seq_len: T, tokens in a sequence, or the mean number of tokens that a token attends to.
        causal: count only the half of attention that a causal mask leaves, 6 L H d T.

    Returns:
        Floating-point operations per token. A multiplication and an addition count as two.

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
        peak_flops_per_chip: peak floating-point operations per second of one chip, in the dtype of
            the matmuls.

    Returns:
        The fraction, between 0 and 1.

    Example:
        >>> flops = flops_per_token(540.35e9, 118, 48, 256, 2048)
        >>> f"{model_flops_utilization(238.3e3, flops, 6144, 275e12):.1%}"  # PaLM's own figure
        '46.2%'
    """
    return tokens_per_second * flops_per_token / (num_chips * peak_flops_per_chip)
