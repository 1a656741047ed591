"""Rematerialization: what a layer keeps for the backward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

ATTENTION = "attention"
"""What `jax.ad_checkpoint.checkpoint_name` calls the result of attention, before its projection."""

PROJECTION = "projection"
"""The same, of a projection that no policy of products sees, as it is rounded to 8 bits."""


def _products_and_names(products: Callable[..., Any], names: Callable[..., Any]) -> Callable:
    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        decide = names if primitive.name == "name" else products
        return decide(primitive, *avals, **params)

    return policy


_policies = jax.checkpoint_policies
POLICIES: dict[str, Callable[..., Any]] = {
    "full": _policies.nothing_saveable,
    "dots": _products_and_names(
        _policies.dots_saveable, _policies.save_only_these_names(PROJECTION)
    ),
    "dots_with_no_batch_dims": _products_and_names(
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names(ATTENTION, PROJECTION),
    ),
    "save_attention": _policies.save_only_these_names(ATTENTION),
    "offload": _products_and_names(
        _policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[PROJECTION],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}
"""What a layer keeps besides its input, from least time to least memory.

- "dots": the result of each matrix product, the scores of attention among them (those of the
  implementations "einsum" and "xla" fill [tokens, tokens] for each head).
- "dots_with_no_batch_dims": the results of the projections and that of attention, not the scores.
- "save_attention": the result of attention, so that splash attention's forward kernel does not run
  again, and nothing else.
- "offload": the results of the projections, in the host's memory (not on CPU).
- "full": nothing: the whole layer is computed again.

No policy keeps gathered weights: `fedpax.models.parameters.project` gathers them again.
"""


def rematerialize(step: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Makes the body of a scan over layers keep what the policy says.

    Args:
      step: the body of a scan.
      policy: a name in POLICIES, or "none": everything is kept that the backward pass wants.

    Returns:
      The body, which computes the same.

    Example:
      >>> import jax.numpy as jnp
      >>> step = rematerialize(lambda x, w: (jnp.sin(x @ w), None), "full")
      >>> jax.grad(lambda x: jax.lax.scan(step, x, jnp.ones((3, 1, 1)))[0].sum())(
      ...     jnp.ones((1, 1))
      ... ).shape
      (1, 1)
    """
    if policy == "none":
        return step
    # The scan already keeps the two passes apart, which prevent_cse is there to ensure.
    return jax.checkpoint(step, prevent_cse=False, policy=POLICIES[policy])
