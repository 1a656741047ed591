"""Checks and weights of updates that are encoded before they are averaged."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from fedpax.errors import ArgumentTypeError
from fedpax.primitives import federated_map, federated_sum


def check_floats(function: str, updates: chex.ArrayTree) -> None:
    """Check that updates are arrays of floats."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ArgumentTypeError(
                f"{function}(): updates{jax.tree_util.keystr(path)} has dtype "
                f"{jnp.result_type(leaf)}, expected floats. Use fedpax.aggregators.mean() for "
                "other dtypes."
            )


def normalized_weights(weights: Num[Array, " participants"]) -> Float[Array, " participants"]:
    """Scale weights to a mean of 1. Inside a program."""
    # All are 0 where the weights sum to 0, and NaN where their sum overflows.
    total, n = federated_sum(weights.astype(jnp.float32)), weights.shape[0]
    scale = jnp.where(total == 0, 0.0, n / jnp.where(total == 0, 1.0, total))
    scale = jnp.where(jnp.isinf(total), jnp.nan, scale)
    return federated_map(lambda w: w.astype(jnp.float32) * scale, weights)
