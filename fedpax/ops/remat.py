"""Rematerialization: what a layer stores for the backward pass and what it recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

ATTENTION = "attention"
"""`jax.ad_checkpoint.checkpoint_name` of the output of attention, before its projection."""

PROJECTION = "projection"
"""`checkpoint_name` of a quantized projection, whose int8 or fp8 matmul the policies for matmuls do
not recognize: they store the result by this name."""


def _matmuls_and_names(matmuls: Callable[..., Any], names: Callable[..., Any]) -> Callable:
    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        decide = names if primitive.name == "name" else matmuls
        return decide(primitive, *avals, **params)

    return policy


_policies = jax.checkpoint_policies
POLICIES: dict[str, Callable[..., Any]] = {
    "full": _policies.nothing_saveable,
    "dots": _matmuls_and_names(
        _policies.dots_saveable, _policies.save_only_these_names(PROJECTION)
    ),
    "dots_with_no_batch_dims": _matmuls_and_names(
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names(ATTENTION, PROJECTION),
    ),
    "save_attention": _policies.save_only_these_names(ATTENTION),
    "offload": _matmuls_and_names(
        _policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[PROJECTION],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}
"""The values that a layer stores for the backward pass, from least time to least memory.

- "dots": the results of all matmuls, including the scores of attention. The scores of the
  implementations "einsum" and "xla" take [tokens, tokens] numbers per head.
- "dots_with_no_batch_dims": the results of the projections and of attention, but not its scores.
- "save_attention": the result of attention alone, so that the forward kernel of splash attention
  does not run again.
- "offload": the results of the projections, in the host's memory (not on CPU).
- "full": nothing; the whole layer is recomputed.

No policy stores gathered weights: `fedpax.models.layers.project` gathers them again.
"""


def rematerialize(step: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Apply a policy of `POLICIES` to the body of a scan over layers; "none": store all values."""
    if policy == "none":
        return step
    # prevent_cse is not needed: the scan already separates the two passes.
    return jax.checkpoint(step, prevent_cse=False, policy=POLICIES[policy])
