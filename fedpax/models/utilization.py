"""Model FLOPs utilization: which share of the chips' peak a training run turns into a model.

Counted are the products that the model needs, forward and backward, and not what is computed
again to save memory. Two conventions are in use for attention, and figures of one cannot be
compared with those of the other: the full square of scores, even where a mask hides half of it
(PaLM, MaxText), or only the half that a causal mask leaves.

Reference: Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B.
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
    """Floating-point operations of a transformer for one training token.

    6 N + 12 L H d T: two for each parameter and token forward, twice that backward, and the same
    for the scores of attention and their product with the values.

    Args:
      num_params: N, those that are multiplied with: without an embedding that is only looked up;
        of a mixture of experts those that a token uses.
      num_layers: L.
      num_heads: H, query heads.
      head_dim: d, features of a head.
      seq_len: T, tokens in a sequence, or as many as a token attends to.
      causal: count only the half of attention that a causal mask leaves, 6 L H d T.

    Returns:
      Floating-point operations a token, a multiplication and an addition counting as two.

    Example:
      >>> f"{flops_per_token(540.35e9, 118, 48, 256, 2048):.4g}"  # PaLM 540B
      '3.278e+12'
    """
    attention = (6 if causal else 12) * num_layers * num_heads * head_dim * seq_len
    return 6 * num_params + attention


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, num_chips: int, peak_flops_per_chip: float
) -> float:
    """The share of the chips' peak that a model's training uses.

    Args:
      tokens_per_second: of all chips together.
      flops_per_token: see the function of that name.
      num_chips: how many chips.
      peak_flops_per_chip: floating-point operations a second of one, in the type that is multiplied in.

    Returns:
      The share, between 0 and 1.

    Example:
      >>> tokens = flops_per_token(540.35e9, 118, 48, 256, 2048)
      >>> f"{model_flops_utilization(238.3e3, tokens, 6144, 275e12):.1%}"  # PaLM's own figure
      '46.2%'
    """
    return tokens_per_second * flops_per_token / (num_chips * peak_flops_per_chip)
