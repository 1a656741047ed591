"""A weight with a low-rank adapter, in place of the weight among a model's parameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight W with an adapter of rank r: W + scale A B, of which no matrix is computed."""

    # `fedpax.models.parameters.project` computes x W + scale (x A) B. It is a pytree, so stacked
    # layers can be scanned.

    weight: jax.Array  # W, `[..., *inputs, *outputs]`, where `...` are the axes of stacked layers
    a: jax.Array  # A, `[..., *inputs, rank]`
    b: jax.Array  # B, `[..., rank, *outputs]`
    scale: float = dataclasses.field(metadata={"static": True})  # a number; alpha / rank in LoRA


def merge_weight(adapted: AdaptedWeight, num_inputs: int) -> jax.Array:
    """Compute W + scale A B, in float32 at least, in the shape and dtype of W."""
    weight, a, b = adapted.weight, adapted.a, adapted.b
    num_stacked = a.ndim - num_inputs - 1
    letters = "ijklmnopq"[: weight.ndim]
    stacked, inner = letters[:num_stacked], letters[num_stacked:]
    inputs, outputs = inner[:num_inputs], inner[num_inputs:]
    accurate = jnp.promote_types(weight.dtype, jnp.float32)
    update = jnp.einsum(
        f"{stacked}{inputs}r,{stacked}r{outputs}->{letters}",
        a.astype(accurate),
        b.astype(accurate),
        precision="highest",
    )
    return (weight.astype(accurate) + adapted.scale * update).astype(weight.dtype)
